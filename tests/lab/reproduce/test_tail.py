"""The rows of mean and tail, on small cells."""

from __future__ import annotations

import math

import pytest

from lab.reproduce.combined import CombinedCell, RatioTarget, cell_rows
from lab.reproduce.tail import light_rows, overload_rows


@pytest.mark.nightly
def test_an_overloaded_cell_has_its_targets_and_bounds() -> None:
    cell = CombinedCell("small", "zipf", 1.3, 12_000, num_requests=200, cv=4.0)
    rows = {row.metric: row for row in overload_rows(cell, 0.01, seeds=(5,))}
    assert list(rows) == ["farsight: mean", "farsight: p99", "farsight: p99.9", "farsight: pause p99 / fcfs"]
    assert all(math.isfinite(row.ours) and row.ours > 0 for row in rows.values())
    assert rows["farsight: mean"].verdict == "off", "the limit is the cell's own"
    for metric in ("farsight: mean", "farsight: p99"):
        row = rows[metric]
        bound = float(row.note.split("bound ")[1])
        assert 0 < bound <= row.ours + 0.005


@pytest.mark.nightly
def test_at_a_light_load_it_is_held_against_the_best_of_each_figure() -> None:
    cell = CombinedCell("small", "zipf", 0.5, 12_000, num_requests=100, cv=1.0)
    rows = light_rows(cell, seeds=(5,))
    assert [row.metric for row in rows] == ["farsight: mean / best", "farsight: p99 / best"]
    assert all("against" in row.note for row in rows)


@pytest.mark.nightly
def test_each_target_is_a_row_against_the_best_setting_of_its_policy() -> None:
    cell = CombinedCell("small", "zipf", 1.1, 12_000, num_requests=150, cv=4.0)
    targets = (RatioTarget("past-future", 0.5, 10.0), RatioTarget("mlfq", 0.5, 0.01))
    rows = cell_rows(cell, targets, num_seeds=1)
    assert [(row.setting, row.metric) for row in rows] == [
        ("small 1.1", "farsight-mean: jct / past-future"),
        ("small 1.1", "farsight-mean: jct / mlfq"),
    ]
    assert [row.verdict for row in rows] == ["ok", "off"]
    assert all(math.isfinite(row.ours) and row.ours > 0 for row in rows)
    assert "against mlfq" in rows[1].note
