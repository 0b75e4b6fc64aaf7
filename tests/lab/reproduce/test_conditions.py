"""Tables of one condition changed at a time, on measures of a moment; and what the conditions change."""

from __future__ import annotations

import pickle

import pytest

from farsight.policies.interfaces import Job
from lab.reproduce.conditions import conditions
from lab.reproduce.magnus_systems import InGroups, Stalling, case_study_latency
from lab.reproduce.register import REPRODUCTIONS
from lab.reproduce.rows import Figure, near


def measured(condition: float, seed: int) -> dict[str, float]:
    return {"factor": condition + 0.01 * seed, "ratio": condition - 1 + 0.01 * seed}


def test_each_condition_has_a_row_for_each_metric_with_every_draw() -> None:
    wanted: dict[str, Figure | float] = {"factor": near(2, share=0.25), "ratio": 1.0}
    table = conditions("made", "A paper", {"as reproduced": 1.0, "doubled": 2.1}, measured, wanted)
    rows = [row for cell in table.cells for row in pickle.loads(pickle.dumps(cell))()]
    assert [(row.setting, row.metric, row.verdict) for row in rows] == [
        ("as reproduced", "factor", "off"),
        ("as reproduced", "ratio", "off"),
        ("doubled", "factor", "ok"),
        ("doubled", "ratio", "ok"),
    ]
    assert rows[2].ours == pytest.approx(2.13) and rows[2].draws.values == pytest.approx((2.12, 2.13, 2.14))


def test_every_table_of_conditions_can_be_sent_to_processes() -> None:
    for name, each in REPRODUCTIONS.items():
        if name.startswith("conditions_"):
            pickle.dumps(each.cells)


def test_requests_join_in_groups() -> None:
    jobs = [Job(str(i), 0.0, 5, 10) for i in range(7)]
    admission = InGroups(num_seats=7, group=3)
    joins = []
    for num_running in (0, 3, 4, 5, 7):
        admission.begin(jobs[:num_running], 1000)
        joins.append(admission.admits(jobs[0]))
    assert joins == [True, True, True, False, False]


def test_padding_makes_context_dearer() -> None:
    plain, padded = Stalling(case_study_latency()), Stalling(case_study_latency(), padding=3.0)
    assert padded.step_s(0, 7, 1000) == plain.step_s(0, 7, 3000) > plain.step_s(0, 7, 1000)
    assert padded.decode_run_s(7, 1000, 5) == plain.decode_run_s(7, 3000, 5)
