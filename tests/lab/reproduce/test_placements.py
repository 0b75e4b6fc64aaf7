"""Placements side by side, reduced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.reproduce import placements
from lab.reproduce.placements import CHATS, CONTESTS, HEAVY, PROGRAMS, PlacementSystem, rows


def test_programs_are_spread_at_once_by_forecasts_and_after_fifty_requests_by_e2() -> None:
    found = rows("test", replace(PROGRAMS, num_requests=80), CONTESTS, 1.0, seeds=(0,))
    contest = "farsight-mean / e2 (farsight-mean)"
    assert [row.metric for row in found[:2]] == [f"mean: {contest}", f"p99: {contest}"]
    assert len(found) == 2 * len(CONTESTS)
    assert found[0].ours < 0.9 and {row.verdict for row in found} == {"ok", "exempt"}


def test_nothing_shared_is_placed_as_by_least_work() -> None:
    contest = (PlacementSystem("preble"), PlacementSystem("preble", "least-work"))
    (mean, p99) = rows("test", replace(CHATS, num_requests=60), [contest], 1.03, seeds=(0, 1))
    assert mean.ours == pytest.approx(1.0, abs=0.05) and p99.verdict == "exempt"


def test_a_limit_that_is_missed_is_said_to_be() -> None:
    contest = (PlacementSystem("preble", "least-work"), PlacementSystem("preble"))
    assert rows("test", replace(CHATS, num_requests=30), [contest], 0.5, seeds=(0,))[0].verdict == "off"


def test_a_load_is_a_share_of_what_round_robin_completes() -> None:
    cell = replace(HEAVY, num_requests=100, cv=1.0)
    light, heavy = (replace(cell, load=load).arrivals(1) for load in (0.5, 1.0))
    assert light[-1].arrived_at == pytest.approx(2 * heavy[-1].arrived_at)
    at_once = placements.run(cell.cluster, PlacementSystem("fcfs"), [replace(each, arrived_at=0.0) for each in heavy])
    assert heavy[-1].arrived_at == pytest.approx(sorted(at_once.finished_at)[84] / 0.85, rel=0.3)
