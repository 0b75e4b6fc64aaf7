"""The comparison on real compute: what a system's name says, and the table over cells that were measured in parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.real_presets.cells import Bench, System
from benchmarks.real_presets.table import plot, table
from core.errors import ConfigError


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


def test_a_system_without_a_preset_is_refused() -> None:
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
    (tmp_path / "capacity-hol.json").write_text('{"requests_per_s": 1.0}', "utf-8")
    for seed in (1, 2):
        measured(tmp_path, "fcfs", seed, 4000.0 * seed)
        measured(tmp_path, "farsight", seed, 2000.0 * seed)
    measured(tmp_path, "farsight", 3, 1.0)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(tmp_path, ["fcfs"]).splitlines()]
    found = {row[1]: row for row in rows if row[0] == "hol 1.8"}
    assert found["fcfs"][2:] == ["2", "6.00", "6.00", "2.00", "0.10", "800", ""]
    assert found["farsight"][2:4] == ["3", "2.00"]
    assert found["farsight"][-1].startswith("0.50 (0.50 to 0.50), 1.00"), "seeds that both have"


def test_the_picture_shows_all_cells(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured(tmp_path, "fcfs", 1, 4000.0)
    plot(tmp_path, tmp_path / "presets.svg")
    assert "<svg" in (tmp_path / "presets.svg").read_text("utf-8")
