"""KV that outlives its request, in files: equal texts with and without, and nothing is read that was not kept."""

from __future__ import annotations

import dataclasses
import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from farsight.core.config.engine import EngineConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.errors import ConfigError
from farsight.core.messages.kv import BlockName, KVIdentity
from farsight.core.request import SamplingParams
from farsight.engine.build import build_worker
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.engine import Engine
from farsight.engine.kv_files import KVFiles, bound, clear, drop_unused, kept_in, open_folder, weights_checksum
from farsight.kvcache import LeaseExecutor
from farsight.kvcache.tiers import KVTiers, TierCounts, TierPrices

IDENTITY = KVIdentity("llama", "a1", "float32", "full", "1.0", 32, 4096)
SIZE = 16
NIGHTLY = pytest.mark.nightly


def block_bytes(model: Path, settings: Mapping[str, object]) -> int:
    dtype = torch.int8 if settings.get("kv_dtype") == "int8" else torch.float32
    return load_model_config(model).kv_bytes_per_token(dtype) * SIZE


class Unpriced(TierPrices):
    """Prices that are never known, whatever the speed of this machine: all that lies below comes back."""

    def computed(self, num_tokens: int, seconds: float) -> None: ...

    def brought(self, num_host: int, num_disk: int, seconds: float) -> None: ...


class Talker:
    """An engine whose pool holds about two of its conversations."""

    def __init__(self, model: Path, folder: Path | None, *, backend: str = "auto", **settings: Any) -> None:
        self.block_bytes = block_bytes(model, settings)
        config = EngineConfig(
            kv_memory=str(14 * self.block_bytes),
            block_size=SIZE,
            max_num_seqs=4,
            max_batch_tokens=48,
            max_model_len=200,
            num_threads=1,
            backend=backend,
            disk_kv="" if folder is None else str(folder),
        )
        self.engine = Engine(model, dtype="float32", engine=dataclasses.replace(config, **settings))
        if folder is not None:
            self.tiers.prices = Unpriced()

    @property
    def tiers(self) -> KVTiers:
        executor = self.engine.worker.executor
        assert isinstance(executor, LeaseExecutor)
        assert executor.transfers.tiers is not None
        return executor.transfers.tiers

    @property
    def counts(self) -> TierCounts:
        return self.tiers.counts

    def answer(self, *prompts: list[int]) -> list[tuple[int, ...]]:
        sampling = SamplingParams(6, ignore_eos=True)
        answers = [each.token_ids for each in self.engine.generate(list(prompts), sampling)]
        self.engine.check_integrity()
        return answers

    def settle(self) -> None:
        """Runs until everything that is to be saved is saved."""
        executor = self.engine.worker.executor
        assert isinstance(executor, LeaseExecutor)
        while self.engine.worker.begin_step() is None and executor.transfers._saving:
            self.engine.worker.wait_for_copy()


def talks(num: int, length: int = 75) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(3, 250) for _ in range(length)] for _ in range(num)]


def converse(talker: Talker, turns: int = 3) -> list[tuple[int, ...]]:
    """Conversations that take turns, two at a time: each turn is the last one with its answer and a few new words."""
    told, answers = talks(4), []
    for turn in range(turns):
        for pair in (0, 2):
            found = talker.answer(*told[pair : pair + 2])
            talker.settle()
            for i, tokens in enumerate(found, pair):
                told[i] = [*told[i], *tokens, 5 + turn, 6, 7]
            answers += found
    return answers


@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        ("gqa", "auto"),
        *(
            pytest.param(*each, marks=NIGHTLY)
            for each in (("latents", "auto"), ("long_window", "auto"), ("gqa", "torch"))
        ),
    ],
)
def test_texts_are_the_same_and_little_is_computed_twice(
    saved: Callable[[str], Path], tmp_path: Path, shape: str, backend: str
) -> None:
    model = saved(shape)
    expected = converse(Talker(model, None, backend=backend))
    talker = Talker(model, tmp_path / "kv", backend=backend)
    assert converse(talker) == expected
    assert talker.counts.disk_brought > 20
    assert talker.counts.damaged == 0
    for folder, _, files in os.walk(tmp_path / "kv"):
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
        assert {stat.S_IMODE(Path(folder, file).stat().st_mode) for file in files} <= {0o600}


@NIGHTLY
def test_int8_kv_and_a_host_tier(saved: Callable[[str], Path], tmp_path: Path) -> None:
    model = saved("gqa")
    expected = converse(Talker(model, None, kv_dtype="int8"))
    host = str(5 * block_bytes(model, {"kv_dtype": "int8"}))
    talker = Talker(model, tmp_path, kv_dtype="int8", host_kv_memory=host)
    assert converse(talker) == expected
    assert talker.tiers.limits.host_blocks == 5
    assert talker.counts.host_brought + talker.counts.disk_brought > 20


def test_a_new_process_finds_it_and_a_damaged_file_costs_only_its_tokens(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    model, (talk, *_) = saved("gqa"), talks(1)
    before = Talker(model, tmp_path)
    (expected,) = before.answer(talk)
    before.settle()
    after = Talker(model, tmp_path)
    assert after.answer(talk) == [expected]
    assert (after.counts.disk_brought, after.engine.worker.executor.prefix_hits) == (4, 64)
    for number, harm in enumerate((truncate, flip, link, lengthen, fifo)):
        third = sorted(after.tiers.disk.blocks(), key=lambda each: talk_place(after, talk, each))[2]
        (path,) = tmp_path.rglob(f"{third.name:016x}-*.kv")
        harm(path)
        again = Talker(model, tmp_path)
        assert again.answer(talk) == [expected]
        found = again.counts.disk_brought
        assert (found, again.counts.damaged) in ((2, 0), (2, 1)), f"harm {number}"
        again.settle()
        assert sum(1 for _ in tmp_path.rglob("*.kv")) >= 4
        after = again


def talk_place(talker: Talker, talk: list[int], block: BlockName) -> int:
    from farsight.kvcache.block_manager import hash_blocks

    names = hash_blocks(talk, SIZE)
    return names.index(block.name) if block.name in names else len(names)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@NIGHTLY
@pytest.mark.parametrize(
    "settings", [{"block_size": 32}, {"kv_dtype": "int8"}, {"weights": "int8"}, {"backend": "torch"}]
)
def test_another_form_never_reads_it(saved: Callable[[str], Path], tmp_path: Path, settings: dict[str, str]) -> None:
    model, (talk, *_) = saved("gqa"), talks(1)
    first = Talker(model, tmp_path)
    first.answer(talk)
    first.settle()
    assert len(first.tiers.disk) > 3
    assert len(Talker(model, tmp_path, **settings).tiers.disk) == 0
    assert len(Talker(saved("mha"), tmp_path).tiers.disk) == 0


def test_workers_of_one_host_share_it(saved: Callable[[str], Path], tmp_path: Path) -> None:
    model, (talk, *_) = saved("gqa"), talks(1)
    first, second = Talker(model, tmp_path), Talker(model, tmp_path)
    expected = first.answer(talk)
    first.settle()
    assert second.answer(talk) == expected
    assert second.counts.disk_brought == 4


def test_a_full_disk_costs_nothing_but_the_hits(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved("gqa")
    expected = converse(Talker(model, None), turns=1)
    talker = Talker(model, tmp_path)

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", no_space)
    assert converse(talker, turns=1) == expected
    talker.settle()
    assert (len(talker.tiers.disk), talker.counts.disk_saved) == (0, 0)
    assert not list(tmp_path.rglob("*.part"))


def test_where_nothing_can_be_kept_it_is_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    engine = EngineConfig(disk_kv=str(tmp_path), num_threads=1)
    with pytest.raises(ConfigError, match=r"engine\.disk_kv.*lockstep"):
        build_worker(saved("gqa"), "float32", engine, "w", scheduler=SchedulerConfig(execution="static"))
    with pytest.raises(ConfigError, match=r"engine\.disk_kv.*prefix_cache"):
        EngineConfig(disk_kv="x", prefix_cache=False)
    with pytest.raises(ConfigError, match=r"engine\.disk_kv_bytes.*a size"):
        EngineConfig(disk_kv_bytes="0")
    with pytest.raises(ConfigError, match=r"engine\.disk_kv_bytes.*block"):
        build_worker(saved("gqa"), "float32", dataclasses.replace(engine, disk_kv_bytes="9"), "w")


# -- Files


@contextmanager
def files_in(folder: Path, identity: KVIdentity = IDENTITY) -> Iterator[KVFiles]:
    files = KVFiles(folder, identity)
    try:
        yield files
    finally:
        files.close()


def payload(seed: int) -> memoryview:
    return memoryview(random.Random(seed).randbytes(IDENTITY.block_bytes))


@pytest.mark.parametrize("tenant", ["", "acme", "../../etc", ".", "a/b\0c", "é" * 300])
def test_a_tenant_of_any_name_has_a_folder_of_his_own(tmp_path: Path, tenant: str) -> None:
    with files_in(tmp_path) as files:
        block = BlockName(7, 0, tenant)
        files.write(block, payload(7))
        files.write(BlockName(7, 0, "other"), payload(8))
        back = bytearray(IDENTITY.block_bytes)
        assert files.read(block, memoryview(back)) and back == payload(7)
        assert sum(1 for _ in tmp_path.rglob("*.kv")) == 2
        assert clear(tmp_path, tenant) == 1
        assert not files.read(block, memoryview(back))
        assert files.read(BlockName(7, 0, "other"), memoryview(back))


def test_the_index_is_the_listing_and_strangers_are_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with files_in(tmp_path) as files:
        for name in (3, 1, 2):
            files.write(BlockName(name, name - 1), payload(name))
            os.utime(files._file(BlockName(name, name - 1)), (100 + name, 100 + name))
        folder = files._file(BlockName(1, 0)).parent
        (folder / "readme").write_bytes(b"x")
        (folder / f"{9:016x}-{8:016x}.kv").write_bytes(b"short")
        (folder / f"{5:016x}-{4:016x}.kv").symlink_to("/etc/passwd")
        (folder / f"{6:016x}-{4:016x}.kv").mkdir()
        part = folder / f"{4:016x}.1.1.part"
        part.write_bytes(b"half")
        os.utime(part, (1, 1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", lambda *_: pytest.fail("a file was opened: an index of 100,000 takes a second"))
            assert files.blocks() == [BlockName(1, 0), BlockName(2, 1), BlockName(3, 2)]
        assert sorted(path.name[:16] for path in folder.iterdir() if path.suffix == ".kv" and path.is_file()) != []
        assert not part.exists()
        assert (folder / "readme").exists()
        files.read_ahead([1, 2, 3, 4], "", 1)  # as far as they are there
        assert files.find([1, 2, 3, 4], "") == [BlockName(1, 0), BlockName(2, 1), BlockName(3, 2)]


def test_a_block_under_another_name_is_not_read(tmp_path: Path) -> None:
    with files_in(tmp_path) as files:
        files.write(BlockName(1, 0), payload(1))
        files._file(BlockName(1, 0)).rename(files._file(BlockName(2, 0)))
        assert not files.read(BlockName(2, 0), memoryview(bytearray(IDENTITY.block_bytes)))


def test_a_folder_that_others_may_open_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        open_folder(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="no link"):
        open_folder(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="a folder"):
        open_folder(tmp_path / "file")


def test_what_is_kept_is_shown_bounded_and_cleared(tmp_path: Path) -> None:
    with files_in(tmp_path) as files:
        for name in range(1, 6):
            block = BlockName(name, name - 1, "a" if name < 4 else "b")
            files.write(block, payload(name))
            os.utime(files._file(block), (name, name))
        kept = {each.tenant: each for each in kept_in(tmp_path)}
        assert [(each.num_files, each.about["model"]) for each in (kept["a"], kept["b"])] == [
            (3, "llama"),
            (2, "llama"),
        ]
        assert bound(tmp_path, 2 * (IDENTITY.block_bytes + 64)) == 3
        assert {each.name for each in files.blocks()} == {4, 5}
        assert clear(tmp_path) == 2


def test_an_unused_build_leaves_when_room_is_short(tmp_path: Path) -> None:
    old = dataclasses.replace(IDENTITY, build="0.9")
    with files_in(tmp_path, old) as files:
        files.write(BlockName(1, 0), payload(1))
        drop_unused(tmp_path, 10)
        assert files.blocks(), "it is in use"
    drop_unused(tmp_path, 10**9)
    assert len(kept_in(tmp_path)) == 1
    drop_unused(tmp_path, 10)
    assert kept_in(tmp_path) == []


def test_weights_are_told_apart_by_what_they_are(tmp_path: Path) -> None:
    folder, model = open_folder(tmp_path / "kv"), tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    first = weights_checksum(model, folder)
    assert weights_checksum(model, folder) == first
    (model / "model.safetensors").write_bytes(b"others!")
    os.utime(model / "model.safetensors", (5, 5))
    assert weights_checksum(model, folder) != first
    (folder / "weights.json").write_bytes(b"{nonsense")
    assert len(weights_checksum(model, folder)) == 64


WRITER = """
import dataclasses, random, sys
from pathlib import Path
from farsight.core.messages.kv import BlockName, KVIdentity
from farsight.engine.kv_files import KVFiles
files = KVFiles(Path(sys.argv[1]), KVIdentity(**eval(sys.argv[2])))
print("ready", flush=True)
name = 0
while True:
    name += 1
    files.write(BlockName(name, name - 1), memoryview(random.Random(name).randbytes(files._identity.block_bytes)))
"""


def test_a_kill_in_the_middle_of_writes_leaves_whole_blocks(tmp_path: Path) -> None:
    identity = dataclasses.replace(IDENTITY, block_bytes=1 << 20)
    command = [sys.executable, "-c", WRITER, str(tmp_path), repr(dataclasses.asdict(identity))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        while not list(tmp_path.rglob("*.kv")):
            time.sleep(0.001)
        writer.kill()
    with files_in(tmp_path, identity) as files:
        found, back = files.blocks(), bytearray(identity.block_bytes)
        assert found
        for block in found:
            assert files.read(block, memoryview(back))
            assert back == random.Random(block.name).randbytes(identity.block_bytes)
        for part in tmp_path.rglob("*.part"):
            os.utime(part, (1, 1))
        files.blocks()
        assert not list(tmp_path.rglob("*.part"))
