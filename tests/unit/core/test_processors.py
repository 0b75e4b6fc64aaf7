"""How many processors a process may use: under a mask, and in control groups of either version."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from farsight.core.processors import (
    MAPPED_BYTES,
    bind_to_node,
    compute_threads,
    numa_nodes,
    quota_processors,
    usable_processors,
)

ROOT = Path(__file__).parents[3]

V1 = "36 25 0:31 {top} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
V1_MEMORY = "37 25 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2 = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
DISK = "22 1 8:1 / / rw,relatime - ext4 /dev/root rw\n"


def tree(root: Path, mounts: str, memberships: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/mountinfo": mounts, "proc/self/cgroup": memberships, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v1(group: str, quota: object, period: object = 100_000) -> dict[str, str]:
    folder = f"sys/fs/cgroup/cpu,cpuacct{group}"
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("text", "processors"),
    [
        ("200000 100000", 2.0),
        ("50000 100000", 0.5),
        ("max 100000", None),
        ("", None),
        ("nonsense", None),
        ("1 0", None),
    ],
)
def test_quota_of_version_2(tmp_path: Path, text: str, processors: float | None) -> None:
    found = tree(tmp_path, DISK + V2.format(top="/"), "0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": text})
    assert quota_processors(found) == processors


@pytest.mark.parametrize(("quota", "processors"), [(150_000, 1.5), (-1, None), ("", None)])
def test_quota_of_version_1(tmp_path: Path, quota: object, processors: float | None) -> None:
    memberships = "4:memory:/other\n3:cpu,cpuacct:/job\n0::/\n"
    files = {**v1("/job", quota), **v1("/other", 1000), "sys/fs/cgroup/memory/job/cpu.cfs_quota_us": "1000"}
    assert quota_processors(tree(tmp_path, V1.format(top="/") + V1_MEMORY, memberships, files)) == processors


def test_the_least_quota_up_to_the_mount_counts(tmp_path: Path) -> None:
    quotas = {
        "": "max 100000",
        "/slice": "300000 100000",
        "/slice/pod": "max 100000",
        "/slice/pod/box": "400000 100000",
    }
    files = {f"sys/fs/cgroup{group}/cpu.max": text for group, text in quotas.items()}
    assert quota_processors(tree(tmp_path, V2.format(top="/"), "0::/slice/pod/box\n", files)) == 3
    assert quota_processors(tmp_path / "nothing") is None
    assert quota_processors(tree(tmp_path / "no", "not a mount table\n\n - \n", "neither this\n", {})) is None
    files = {**v1("/job", 500_000), "sys/fs/cgroup/cpu.max": "250000 100000"}
    mounts, memberships = V1.format(top="/") + V2.format(top="/"), "3:cpu,cpuacct:/job\n0::/\n"
    assert quota_processors(tree(tmp_path / "both", mounts, memberships, files)) == 2.5, "both versions at once"
    mount = V2.format(top="/").replace("/sys/fs/cgroup", "/my\\040groups")
    spaced = tree(tmp_path / "spaced", mount, "0::/\n", {"my groups/cpu.max": "100000 100000"})
    assert quota_processors(spaced) == 1, "a mount point with spaces"


@pytest.mark.parametrize(
    ("top", "path"), [("/docker/1f", "/docker/1f"), ("/", "/../outside"), ("/docker/1f", "/"), ("/..", "/x")]
)
def test_a_container_sees_its_own_group_at_the_mount(tmp_path: Path, top: str, path: str) -> None:
    found = tree(tmp_path, V2.format(top=top), f"0::{path}\n", {"sys/fs/cgroup/cpu.max": "100000 100000"})
    assert quota_processors(found) == 1


@pytest.mark.parametrize(("quota", "processors"), [("100 100000", 1), ("100000 100000", 1), ("9900000 1000", None)])
def test_the_least_of_mask_and_quota_but_at_least_one(tmp_path: Path, quota: str, processors: int | None) -> None:
    found = tree(tmp_path, V2.format(top="/"), "0::/\n", {"sys/fs/cgroup/cpu.max": quota})
    assert usable_processors(found) == (processors or usable_processors(tmp_path / "nothing"))


def processors(monkeypatch: pytest.MonkeyPatch, root: Path, *nodes: str, count: int = 8) -> Path:
    """A root where so many processors may be used, in the NUMA nodes given."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)
    for index, cpulist in enumerate(nodes):
        folder = root / f"sys/devices/system/node/node{index}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpulist + "\n")
    return root


def test_threads_are_shared_among_workers_and_fit_a_numa_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = processors(monkeypatch, tmp_path)
    assert [compute_threads(0, sharers, root) for sharers in (1, 2, 7, 100)] == [7, 3, 1, 1]
    assert compute_threads(5, 100, root) == 5
    root = processors(monkeypatch, tmp_path, "0-1,4", "2-3,5-7,9-12", "8", "")
    assert numa_nodes(root) == [{0, 1, 4}, {2, 3, 5, 6, 7}]
    assert [compute_threads(0, sharers, root) for sharers in (1, 2, 7)] == [5, 3, 1]
    assert compute_threads(8, 1, root) == 8


@pytest.mark.parametrize(("count", "threads"), [(1, 1), (2, 2), (3, 3), (4, 3), (16, 15)])
def test_a_processor_is_spared_only_where_it_is_a_small_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int, threads: int
) -> None:
    assert compute_threads(0, 1, processors(monkeypatch, tmp_path, count=count)) == threads
    assert compute_threads(0, 2, processors(monkeypatch, tmp_path, count=count)) == max(1, threads // 2)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity masks")
@pytest.mark.torch
@pytest.mark.parametrize("num_masked", [1, 2])
def test_a_mask_decides_threads_placement_and_ingress_replicas(num_masked: int) -> None:
    """In a process of its own. ``os.cpu_count`` says 64 there: what still asks it would give itself away."""
    code = f"""
import os
os.cpu_count = lambda: 64
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{num_masked}])
import torch
from farsight.core.config.engine import EngineConfig
from farsight.core.config.load import FarsightConfig
from farsight.core.config.engine import ModelConfig
from farsight.engine.build import build_worker
from farsight.services.bench.report import provenance
from farsight.services.launch.launch import EMBEDDED_MODEL, default_ingress_replicas, resolve_placement
build_worker(EMBEDDED_MODEL, "auto", EngineConfig(kv_memory="1MiB"), incarnation="test")
emulated = FarsightConfig(engine=EngineConfig(device="emulated:a100-7b"), model=ModelConfig(replicas=3))
print(torch.get_num_threads(), resolve_placement(FarsightConfig()), default_ingress_replicas(),
      resolve_placement(emulated), provenance(["x"])["machine"]["cpu_count"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    mask = min(num_masked, len(os.sched_getaffinity(0)))
    assert done.stdout.split() == ["1", "together", "1", "packed", str(mask)], done.stderr


def test_one_function_counts_processors() -> None:
    """All others would count those of the machine."""
    counts = re.compile(r"\bcpu_count\s*\(|\bsched_getaffinity\s*\(|\bnum_cores\s*=\s*os\b")
    rooms = [
        each for each in ROOT.iterdir() if each.is_dir() and not each.name.startswith(".") and each.name != "tests"
    ]
    asking = {
        str(path.relative_to(ROOT)): line.strip()
        for room in rooms
        for path in room.rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if counts.search(line) and path != ROOT / "core" / "processors.py"
    }
    # Those choose one processor to run on; they do not count.
    assert all("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})" in line for line in asking.values()), asking


def test_workers_take_turns_at_nodes_and_the_process_keeps_its_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[tuple[int, frozenset[int]]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append((pid, cpus)), raising=False)
    nodes = {f"sys/devices/system/node/node{i}/cpulist": f"{4 * i}-{4 * i + 3}\n" for i in range(2)}
    root = tree(tmp_path, V2.format(top="/"), "0::/\n", nodes)
    first, second = frozenset(range(4)), frozenset(range(4, 8))
    assert [bind_to_node(place, 4, root) for place in range(3)] == [first, second, first]
    assert bound == [(0, first), (0, second), (0, first)], "0 is the calling thread"
    assert bind_to_node(0, 5, root) is None, "more threads than a node has processors"
    assert bind_to_node(0, 1, tree(tmp_path / "one", V2.format(top="/"), "0::/\n", {})) is None
    assert len(bound) == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
def test_a_bound_thread_does_not_change_what_the_process_may_use(tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(os.getpid()))
    if len(usable) < 2:
        pytest.skip("one processor cannot be parted")
    halves = usable[:1], usable[1:]
    nodes = {
        f"sys/devices/system/node/node{i}/cpulist": ",".join(map(str, half)) + "\n" for i, half in enumerate(halves)
    }
    root = tree(tmp_path, V2.format(top="/"), "0::/\n", nodes)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(bind_to_node, 0, 1, root).result() == frozenset(halves[0])
        assert thread.submit(os.sched_getaffinity, 0).result() == set(halves[0])
        assert thread.submit(numa_nodes, root).result() == [frozenset(half) for half in halves]
    assert os.sched_getaffinity(0) == set(usable)


NUM_BLOCKS = 8

_PROGRAM = f"""
import psutil
from farsight.core.processors import return_large_blocks
if {{}}:
    assert return_large_blocks()
bytearray(31 << 20)  # freed at once, and glibc's bound is there from now on
blocks, small = [], []
for _ in range({NUM_BLOCKS}):
    blocks.append(bytearray(b"x" * {MAPPED_BYTES}))
    small.append(bytes(5000))
full = psutil.Process().memory_info().rss
del blocks
print(full - psutil.Process().memory_info().rss)
"""


def freed_bytes(returns: bool) -> int:
    found = subprocess.run([sys.executable, "-c", _PROGRAM.format(returns)], capture_output=True, text=True, check=True)
    return int(found.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_large_blocks_are_returned() -> None:
    assert freed_bytes(returns=True) > (NUM_BLOCKS - 1) * MAPPED_BYTES
    assert freed_bytes(returns=False) < NUM_BLOCKS // 2 * MAPPED_BYTES, "the call makes no difference"
