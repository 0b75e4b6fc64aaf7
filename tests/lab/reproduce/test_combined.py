"""Targets of the combined policy: the rows and what they say, on a small cell."""

from __future__ import annotations

import math

import pytest

from lab.reproduce.combined import RatioTarget, cell_rows
from lab.reproduce.combined_runs import CombinedCell


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
