"""Batch mode by hand: padding, splits, workers that pull."""

from __future__ import annotations

import pytest

from core.costs import StepCost
from policies.batching.fcfs import FcfsBatches
from simulator.cluster.batch_fleet import BatchFleet, RaggedExecution, StaticExecution
from simulator.cluster.latency import LinearLatency
from simulator.cluster.records import Recorder
from simulator.traffic.workload import Arrival

STEP = LinearLatency(StepCost(1.0, 0.0, 0.0, 0.0))
"""Every step takes a second."""


def ends(recorder: Recorder) -> dict[str, float]:
    return {record.arrival.request_id: record.finished_at for record in recorder.done}


def arrivals(*output_lens: int, every_s: float = 0.0) -> list[Arrival]:
    names = "abcdefgh"
    return [Arrival(names[i], i * every_s, 10, n, 100) for i, n in enumerate(output_lens)]


def test_a_static_batch_is_returned_when_its_longest_ends() -> None:
    fleet = BatchFleet(FcfsBatches(2), StaticExecution(STEP))
    assert ends(fleet.run(arrivals(1, 5, 2, 6))) == {"a": 5, "b": 5, "c": 11, "d": 11}
    assert (fleet.counts.num_tokens, fleet.counts.sizes) == (22, [2, 2])


def test_a_ragged_batch_returns_each_when_it_ends() -> None:
    fleet = BatchFleet(FcfsBatches(2), RaggedExecution(STEP))
    assert ends(fleet.run(arrivals(1, 5, 2, 6))) == {"a": 1, "b": 5, "c": 7, "d": 11}
    assert fleet.counts.num_tokens == 14


def test_padding_costs_what_the_longest_prompt_costs() -> None:
    latency = LinearLatency(StepCost(0.0, 1.0, 0.0, 0.1))
    run = StaticExecution(latency).run([10, 4], [3, 1])
    # prefill 2 x 10 tokens, then two steps over 2 x 11 and 2 x 12 tokens of context
    assert run.seconds == pytest.approx(20 + 2.2 + 2.4)
    ragged = RaggedExecution(latency).run([10, 4], [3, 1])
    assert ragged.ends_s == pytest.approx((14 + 1.1 + 1.2, 14))


def test_two_workers_pull_from_one_queue() -> None:
    fleet = BatchFleet(FcfsBatches(1), StaticExecution(STEP), num_workers=2)
    assert ends(fleet.run(arrivals(4, 2, 3))) == {"a": 4, "b": 2, "c": 5}


@pytest.mark.parametrize("execution", [StaticExecution, RaggedExecution])
def test_a_batch_that_runs_out_of_memory_is_split_after_a_reload(
    execution: type[StaticExecution] | type[RaggedExecution],
) -> None:
    """Two of 10 + 20 tokens in 50: they break off, then each runs alone."""
    fleet = BatchFleet(FcfsBatches(2), execution(STEP, capacity=50), reload_s=7.0)
    recorder = fleet.run(arrivals(20, 20))
    assert fleet.counts.num_splits == 1
    assert all(record.num_evictions == 1 for record in recorder.done)
    assert ends(recorder) == {"a": 15 + 7 + 20, "b": 15 + 7 + 40}


def test_a_job_that_fits_nowhere_has_failed_and_the_worker_goes_on() -> None:
    fleet = BatchFleet(FcfsBatches(1), StaticExecution(STEP, capacity=15), reload_s=1.0)
    assert ends(fleet.run(arrivals(20, 3))) == {"b": 9.0}
    assert fleet.failed == ["a"]
