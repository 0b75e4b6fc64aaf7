"""FastServe's figures: the worked example exactly, the order of systems on a small load."""

from __future__ import annotations

import pytest

from simulator.reproduce.fast_serve import a100s, fig6_jct_s
from simulator.reproduce.fast_serve_systems import Load, serve
from simulator.reproduce.register import REPRODUCTIONS


def test_figure_6_job_by_job() -> None:
    assert fig6_jct_s("fcfs") == {"J1": 6, "J2": 8, "J3": 11}
    assert fig6_jct_s("fastserve", skip_join=False) == {"J1": 9, "J2": 10, "J3": 11}
    assert fig6_jct_s("fastserve") == {"J1": 11, "J2": 4, "J3": 5}


def test_figure_6_rows_are_all_ok() -> None:
    rows = list(REPRODUCTIONS["fastserve_fig6"].rows())
    assert [row.ours for row in rows] == pytest.approx([25 / 3, 10, 20 / 3, 6])
    assert {row.verdict for row in rows} == {"ok"}


def test_preemption_helps_where_orca_has_to_queue() -> None:
    bed, load = a100s("gpt-3-175b", 16, 2), Load(2.0, 4.0, 0.9, 2048, 2048, 150)
    ours, orca = serve(bed, load, "fastserve"), serve(bed, load, "fcfs", admission="conservative")
    assert len(ours.done) == len(orca.done) == 150
    assert sum(r.jct_s for r in ours.done) < 0.8 * sum(r.jct_s for r in orca.done)
