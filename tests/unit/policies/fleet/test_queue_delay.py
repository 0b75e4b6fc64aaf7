"""How long a new request would wait: worked examples, and how it moves with load and replicas."""

from __future__ import annotations

import dataclasses

import pytest

from core.costs import StepCost
from core.load_snapshot import Demand, LoadSnapshot
from policies.fleet.queue_delay import queue_delay_s

COST = StepCost(base_s=0.010, prefill_token_s=0.0, decode_seq_s=0.0, context_token_s=0.0)
"""Only steps cost something, so every figure can be worked out by hand."""


def outlook(num_requests: int, *, joins: bool = True, **change: object) -> LoadSnapshot:
    """Requests of 100 known and 50 foreseen tokens in flight; a replica runs 4 of them at once."""
    demand = Demand(num_requests, 0, 0, 100.0 * num_requests, 0.0, 50.0 * num_requests)
    seen = LoadSnapshot(demand, num_replicas=1, max_num_seqs=4, kv_tokens=10_000, joins=joins, cost=COST)
    in_demand = {name: value for name, value in change.items() if hasattr(demand, name)}
    of_fleet = {name: value for name, value in change.items() if name not in in_demand}
    return dataclasses.replace(seen, demand=dataclasses.replace(demand, **in_demand), **of_fleet)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_requests", "num_replicas", "delay_s"),
    [
        (0, 1, 0.0),
        (3, 1, 0.0),  # the fourth has a place
        (4, 1, 0.125),  # one must end: 50 steps of 10 ms for four of them, so one each 125 ms
        (12, 1, 9 * 0.125),
        (12, 2, 5 * 0.125 / 2),
        (12, 4, 0.0),
    ],
)
def test_who_comes_waits_for_places(num_requests: int, num_replicas: int, delay_s: float) -> None:
    assert queue_delay_s(outlook(num_requests), num_replicas) == pytest.approx(delay_s)


def test_memory_may_leave_fewer_places_than_the_batch() -> None:
    assert queue_delay_s(outlook(3), 1) == 0.0
    cramped = outlook(3, kv_tokens=250)  # two, of 125 tokens in the mean over their lives
    assert queue_delay_s(cramped, 1) == pytest.approx(2 * 0.5 / 2)


def test_those_whose_prompts_are_not_computed_come_first_and_cached_tokens_cost_nothing() -> None:
    cost = dataclasses.replace(COST, prefill_token_s=0.001)
    seen = outlook(2, cost=cost)
    # 0.1 s of prefill and 0.5 s of decode: a sixth of the two is in its prefill.
    assert queue_delay_s(seen, 1) == pytest.approx(2 * (0.1 / 0.6) * 0.1)
    assert queue_delay_s(outlook(2, cost=cost, cached_tokens=200.0), 1) == 0.0
    assert queue_delay_s(outlook(2, cost=cost, output_tokens=0.0), 1) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("num_waiting", "num_busy", "num_replicas", "delay_s"),
    [
        (0, 1, 2, 0.0),  # a replica is idle
        (0, 1, 1, 0.25),  # the batch takes 0.5 s and is at its half in the mean
        (3, 1, 1, 0.25),  # who comes joins them
        (4, 1, 1, 0.25 + 0.5),
        (4, 1, 2, 0.5 / 3 + 0.5 / 2),
        (4, 0, 2, 0.5 / 2),  # they have not been pulled yet
    ],
)
def test_who_comes_waits_for_a_replica_that_is_idle_where_batches_run_whole(
    num_waiting: int, num_busy: int, num_replicas: int, delay_s: float
) -> None:
    seen = outlook(4 * num_busy + num_waiting, joins=False, num_waiting=num_waiting, num_busy=num_busy)
    assert queue_delay_s(seen, num_replicas) == pytest.approx(delay_s)


def test_what_cannot_be_said_is_not() -> None:
    assert queue_delay_s(outlook(9, cost=None), 1) is None
    assert queue_delay_s(outlook(9, kv_tokens=0), 1) is None
    assert queue_delay_s(outlook(0), 0) is None
    assert queue_delay_s(outlook(0, cost=None), 1) == 0.0, "nobody is before it"


@pytest.mark.parametrize("joins", [True, False])
def test_more_requests_wait_longer_and_more_replicas_less(joins: bool) -> None:
    cost = StepCost(0.01, 0.11e-3, 0.02e-3, 0.2e-6)
    for num_replicas in range(1, 9):
        waits = [0 if joins else max(0, n - 4 * num_replicas) for n in range(60)]
        in_flight = [outlook(n, joins=joins, cost=cost, num_waiting=wait, num_busy=8) for n, wait in enumerate(waits)]
        delays = [queue_delay_s(seen, num_replicas) for seen in in_flight]
        known = [delay_s for delay_s in delays if delay_s is not None]
        assert len(known) == len(delays)
        assert known == sorted(known)
    for num_requests in (5, 40, 200):
        seen = outlook(num_requests, joins=joins, cost=cost, num_waiting=0 if joins else num_requests // 2, num_busy=2)
        ladder = [queue_delay_s(seen, num_replicas) or 0.0 for num_replicas in range(1, 9)]
        assert ladder == sorted(ladder, reverse=True)
