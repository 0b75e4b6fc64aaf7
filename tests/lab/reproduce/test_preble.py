"""Preble's reproductions, reduced: what must come out at any size."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from farsight.simulator.traffic.prefixes import TOOL_USE, prefix_workload
from lab.reproduce import placements
from lab.reproduce.placements import CHATS, CONTESTS, HEAVY, PROGRAMS, PlacementSystem, rows
from lab.reproduce.preble import figures as preble
from lab.reproduce.preble import parts
from lab.reproduce.preble.runs import (
    FOUR_A6000,
    PREBLE,
    ROUND_ROBIN,
    STUDIES,
    instants,
    partitioned_heads,
    saturation,
    simulate,
)


def test_e2_finds_more_cached_than_round_robin() -> None:
    rng = np.random.default_rng(1)
    arrivals = STUDIES["video"].draw(rng, instants(rng, 200, 4.0), 25)
    ours, baseline = (simulate(FOUR_A6000, system, arrivals) for system in (PREBLE, ROUND_ROBIN))
    assert ours.hit_ratio > 1.5 * baseline.hit_ratio
    assert ours.mean_s < baseline.mean_s


@pytest.mark.nightly
def test_a_run_repeats_itself() -> None:
    first, second = (preble.workloads("video", FOUR_A6000, num_requests=60) for _ in range(2))
    assert first == second
    assert len(first) == 3 * len(preble.LOADS) + 2


def test_saturation_is_above_what_one_replica_could_do_alone() -> None:
    rng = np.random.default_rng(2)
    arrivals = STUDIES["tool"].draw(rng, instants(rng, 100, 1.0), 12)
    last_s = simulate(FOUR_A6000, ROUND_ROBIN, arrivals).ends_at
    assert saturation(FOUR_A6000, arrivals) > 100 / last_s


def test_the_ablation_has_two_rows_for_each_step() -> None:
    rows = preble.ablation(num_requests=60, seeds=(0,))
    assert len(rows) == 2 * (len(preble.ABLATION) - 1)
    assert all(row.ours > 0 for row in rows)


def test_common_blocks_are_no_prefix_of_the_partition() -> None:
    """Tools share a system prompt: a partition by its blocks would give everything to one replica."""
    rng = np.random.default_rng(3)
    arrivals = STUDIES["tool"].draw(rng, instants(rng, 80, 4.0), 12)
    assert arrivals[0].prefix[0] == arrivals[1].prefix[0]
    assert len(partitioned_heads(arrivals)) == len({each.prefix[3] for each in arrivals}) > 1


def test_popularity_drifts() -> None:
    """The tool that is asked for most changes from one span of time to the next."""
    rng = np.random.default_rng(4)
    at = [each / 10 for each in range(1200)]
    drawn = prefix_workload(rng, at, TOOL_USE, 50, 64, popularity=1.6, drift_s=60.0)
    first, second = (Counter(each.prefix[:8] for each in part) for part in (drawn[:600], drawn[600:]))
    assert first.most_common(1)[0][0] != second.most_common(1)[0][0]


@pytest.mark.nightly
def test_the_parts_say_what_they_were_held_against() -> None:
    rows = parts.rebalancing(num_requests=60, seeds=(0,)) + parts.balancing(256, num_requests=18, seeds=(0,))
    rows += parts.rebalancing_programs(num_requests=40, seeds=(0,)) + parts.figure_9(num_requests=40, seeds=(0,))
    assert len(rows) == 2 * 3 + 6
    assert all(row.ours > 0 and row.note for row in rows)


def test_without_the_trace_it_says_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSIGHT_DATA", str(tmp_path))
    (row,) = preble.mixed()
    assert row.verdict == "exempt" and "AzurePublicDataset" in row.remark


def test_the_scheduler_rate_is_said_beside_that_of_the_paper() -> None:
    """How they compare is a matter of the machine, so no test's."""
    rows = preble.scheduler_rate(num_requests=300)
    assert [row.setting for row in rows] == list(preble.RATES)
    for row, (_, _, reported) in zip(rows, preble.RATES.values(), strict=True):
        assert f"{reported:g}" in row.note and row.reported is None, "theirs is of the whole server"
        assert row.verdict == ("ok" if row.ours >= reported else "off")


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
