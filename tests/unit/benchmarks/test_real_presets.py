"""The comparison on real compute: what a system's name says, and the table over cells that were measured in parts."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.real_presets.cells import Bench, Run, System, known_capacity, missing, requests_within
from benchmarks.real_presets.chats import Chat, Drawn, serve
from benchmarks.real_presets.part import expected_s, measure_part
from benchmarks.real_presets.simulated import Machine, simulate
from benchmarks.real_presets.table import plot, table
from farsight.core.errors import ConfigError
from farsight.services.bench.targets import BenchTarget
from farsight.simulator.cluster.latency import A100_7B
from tests.unit.services.bench.fake_server import fake_server


@pytest.mark.parametrize(
    ("text", "system"),
    [
        ("vllm", System("vllm")),
        ("fcfs", System("fcfs", "fcfs")),
        ("old=farsight", System("old", "farsight")),
        ('a=farsight:order="boosted",tail=0.2', System("a", "farsight", ('order="boosted"', "tail=0.2"))),
    ],
)
def test_a_system_is_a_preset_with_settings(text: str, system: System) -> None:
    assert System.parse(text) == system
    with pytest.raises(ConfigError, match="PRESET"):
        System.parse("a=:tail=1")


def test_settings_reach_the_server_and_places_are_those_of_all(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "model", max_num_seqs=3)
    command = bench.command(System("a", "farsight", ("tail=0.2",)), tmp_path)
    assert (tmp_path / "a.toml").read_text("utf-8") == "[engine]\nmax_num_seqs = 3\n[scheduler]\ntail=0.2\n"
    assert list(command.words)[list(command.words).index("--preset") :][:2] == ["--preset", "farsight"]


def measured(folder: Path, system: str, seed: int, mean_ms: float) -> None:
    metrics = {"jct_ms_mean": mean_ms, "jct_ms_p50": mean_ms, "jct_ms_p99": 2000.0, "mtpot_ms_p99": 100.0}
    cell = {"workload": "hol", "load": 1.8, "seed": seed, "system": system}
    record = cell | {"metrics": metrics | {"output_tokens_per_s": 800.0}}
    (folder / f"hol-1.8-{seed}-{system}.json").write_text(json.dumps(record), "utf-8")


def test_cells_of_several_parts_make_one_table_with_paired_ratios(tmp_path: Path) -> None:
    assert known_capacity("hol", tmp_path) is None
    (tmp_path / "capacity-hol.json").write_text('{"requests_per_s": 1.0, "of": "fcfs"}', "utf-8")
    assert known_capacity("hol", tmp_path) == 1.0
    for seed in (1, 2):
        measured(tmp_path, "fcfs", seed, 4000.0 * seed)
        measured(tmp_path, "farsight", seed, 2000.0 * seed)
    measured(tmp_path, "farsight", 3, 1.0)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(tmp_path, ["fcfs"]).splitlines()]
    found = {row[1]: row for row in rows if row[0] == "hol 1.8"}
    assert found["fcfs"][2:] == ["2", "6.00", "6.00", "2.00", "0.10", "800", ""]
    assert found["farsight"][2:4] == ["3", "2.00"]
    assert found["farsight"][-1].startswith("0.50 (0.50 to 0.50), 1.00"), "seeds that both have"
    plot(tmp_path, tmp_path / "presets.svg")
    assert "<svg" in (tmp_path / "presets.svg").read_text("utf-8")


def test_what_has_figures_is_not_measured_again(tmp_path: Path) -> None:
    measured(tmp_path, "fcfs", 1, 4000.0)
    left = missing(["fcfs", "vllm"], ["hol"], [1.1, 1.8], [1, 2], tmp_path)
    assert [(each.seed, each.load, each.system) for each in left] == [
        (1, 1.1, "fcfs"),
        (1, 1.1, "vllm"),
        (1, 1.8, "vllm"),
        (2, 1.1, "fcfs"),
        (2, 1.1, "vllm"),
        (2, 1.8, "fcfs"),
        (2, 1.8, "vllm"),
    ]
    assert measure_part(Bench(tmp_path / "model"), [], [], tmp_path, 10.0) == 0, "nothing starts for nothing"


def test_cells_are_simulated_into_the_same_table(tmp_path: Path) -> None:
    bench, machine = Bench(tmp_path / "model", num_requests=60, max_num_seqs=4), Machine(A100_7B, 20_000)
    systems = [System.parse(each) for each in ("fcfs", "short=fastserve:quantum_s=0.05")]
    for _ in range(2):
        runs = missing([each.name for each in systems], ["hol"], [1.8], [1, 2], tmp_path)
        simulate(bench, machine, systems, runs, tmp_path)
    assert not missing([each.name for each in systems], ["hol"], [1.8], [1, 2], tmp_path)
    records = {path.stem: json.loads(path.read_text("utf-8")) for path in tmp_path.glob("hol-*.json")}
    assert records["hol-1.8-1-fcfs"]["rate"] == pytest.approx(1.8 * (known_capacity("hol", tmp_path) or 0))
    means = {name: record["metrics"]["jct_ms_mean"] for name, record in records.items()}
    assert len(set(means.values())) == 4, "systems and seeds differ"
    assert "short" in table(tmp_path, ["fcfs"])


def test_requests_that_fit_no_replica_are_not_left_out_of_the_figures(tmp_path: Path) -> None:
    bench, runs = Bench(tmp_path / "model", num_requests=20), missing(["fcfs"], ["hol"], [1.8], [1], tmp_path)
    with pytest.raises(ConfigError, match="preset"):
        simulate(
            bench,
            Machine(A100_7B, 20_000),
            [System("vllm")],
            missing(["vllm"], ["hol"], [1.8], [1], tmp_path),
            tmp_path,
        )
    with pytest.raises(RuntimeError, match=r"fcfs: .* of 20 requests did not end"):
        simulate(bench, Machine(A100_7B, 160), [System("fcfs", "fcfs")], runs, tmp_path)


def test_a_part_takes_the_runs_that_fit_and_at_least_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers and clock are stood in for: a run takes exactly what is expected of it."""
    now, served = 0.0, list[str]()
    bench = Bench(tmp_path / "model")

    @contextlib.contextmanager
    def running(bench: Bench, system: System, logs: Path) -> Iterator[str]:
        served.append(system.name)
        yield system.name

    def run_one(bench: Bench, target: str, per_s: float, run: Run, folder: Path) -> None:
        nonlocal now
        now += expected_s(500, run.load, per_s)

    def measure_capacity(bench: Bench, target: str, workload: str, folder: Path, for_s: float) -> float:
        nonlocal now
        now += 30.0
        (tmp_path / f"capacity-{workload}.json").write_text('{"requests_per_s": 10.0}', "utf-8")
        return 10.0

    monkeypatch.setattr("benchmarks.real_presets.part.time.monotonic", lambda: now)
    for each in (running, run_one, measure_capacity):
        monkeypatch.setattr(f"benchmarks.real_presets.part.{each.__name__}", each)
    systems = [System("fcfs", "fcfs"), System("vllm")]
    runs = missing(["fcfs", "vllm"], ["hol", "texts"], [0.9, 1.8], [1], tmp_path)
    light_s, heavy_s = (expected_s(500, load, 10.0) for load in (0.9, 1.8))
    assert light_s > heavy_s > 50.0, "an overload lasts as long as its work, a light load as its arrivals"
    assert measure_part(bench, systems, runs, tmp_path, 1.0) == 8
    assert served == ["fcfs"], "the capacity, and no time for more"
    assert measure_part(bench, systems, runs, tmp_path, 1.0) == 7, "one run, however short the part is"
    assert measure_part(bench, systems, runs, tmp_path, 2 * light_s) == 6
    assert measure_part(bench, systems, runs, tmp_path, math.inf) == 0
    assert served[1:6] == ["fcfs", "fcfs", "vllm", "fcfs", "vllm"]
    assert served[8:10] == ["fcfs", "fcfs"], "the capacity on texts, on the first system, when their turn comes"
    assert requests_within(0.5, 90.0, 250) == 45
    assert requests_within(8.0, 90.0, 250) == requests_within(8.0, math.inf, 250) == 250, "all runs at once"
    assert requests_within(0.5, -3.0, 250) == 0, "the first pass has used up the time"


def test_of_chats_those_that_no_one_reads_are_asked_for_as_a_whole() -> None:
    drawn = [Drawn(0.0, Chat("hello", 3, 8), is_read) for is_read in (True, False, True, False)]
    with fake_server() as server:
        metrics = serve(BenchTarget("fake", server.base_url, "fake"), drawn)
    assert sorted(body["stream"] for body in server.bodies) == [False, False, True, True]
    assert (metrics["requests"], metrics["errors"]) == (4, 0)
    assert metrics["unread_jct_ms_mean"] > 0
    assert 0 < metrics["read_ttft_ms_p50"] <= metrics["read_ttft_ms_p99"]
    assert metrics["read_late_ms_p99"] >= 0
