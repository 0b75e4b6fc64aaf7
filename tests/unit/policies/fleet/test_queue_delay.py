"""How long a new request would wait, and its predicted times beside what its client wants."""

from __future__ import annotations

import dataclasses

import pytest

from farsight.core.costs import StepCost
from farsight.core.forecast import QUANTILES, Forecast
from farsight.core.messages.requests import Demand, LoadSnapshot
from farsight.core.request import NO_SLO, Request, SamplingParams, Slo
from farsight.policies.fleet.queue_delay import (
    LEVEL,
    MIN_WAITS,
    TargetCheck,
    WaitErrors,
    delay_law,
    missed_target,
    predict,
    queue_delay_s,
)

FLAT = StepCost(base_s=0.010, prefill_token_s=0.0, decode_seq_s=0.0, context_token_s=0.0)
"""Only steps cost something, so every figure can be worked out by hand."""


def outlook(num_requests: int, *, joins: bool = True, **change: object) -> LoadSnapshot:
    """Requests of 100 known and 50 foreseen tokens in flight; a replica runs 4 of them at once."""
    demand = Demand(num_requests, 0, 0, 100.0 * num_requests, 0.0, 50.0 * num_requests)
    seen = LoadSnapshot(demand, num_replicas=1, max_num_seqs=4, kv_tokens=10_000, joins=joins, cost=FLAT)
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
    cost = dataclasses.replace(FLAT, prefill_token_s=0.001)
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
    assert queue_delay_s(outlook(0, cost=None), 1) == 0.0, "none is before it"


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


COST = StepCost(0.010, 0.0001, 0.0, 0.0)
"""A step takes 10 ms, and 0.1 ms a prompt token more."""

EMPTY = LoadSnapshot(Demand(0, 0, 0, 0, 0, 0), 1, 4, 10_000, joins=True, cost=COST)


def busy(num: int, *, with_targets: int, variance: float = 0.0) -> LoadSnapshot:
    """So many requests of 100 prompt tokens and 100 output tokens; four run at once."""
    demand = Demand(num, 0, 1, 100.0 * num, 0, 100.0 * num, variance * num, with_targets)
    return dataclasses.replace(EMPTY, demand=demand)


def request(max_tokens: int = 101, *, slo: Slo = NO_SLO, deadline_s: float | None = None) -> Request:
    sampling = SamplingParams(max_tokens, ignore_eos=True)
    return Request("r", 0, "i", (1,) * 100, sampling, slo=slo, deadline_s=deadline_s)


def test_an_idle_service_takes_as_long_as_the_request_itself() -> None:
    predicted = predict(EMPTY, request(), LEVEL)
    assert predicted is not None
    assert [predicted.ttft_s, predicted.tpot_s] == pytest.approx([0.030, 0.010])
    assert predicted.end_s == pytest.approx(0.030 + 100 * 0.010)


def test_a_length_that_is_not_certain_counts_with_its_quantile() -> None:
    quantiles = (10.0, 20.0, 30.0, 40.0, 50.0, 95.0)
    assert len(quantiles) == len(QUANTILES)
    free = dataclasses.replace(request(), sampling=SamplingParams(400))
    known = dataclasses.replace(free, forecast=Forecast(30.0, quantiles, 9, "test", 0))
    seen = dataclasses.replace(EMPTY, lengths=(1.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    ends = [predict(seen, each, 0.9) for each in (request(), free, known)]
    assert [each and round((each.end_s - each.ttft_s) / 0.010) for each in ends] == [100, 1, 50]
    unknown = predict(EMPTY, free, 0.9)
    assert unknown is not None and unknown.end_s == pytest.approx(0.030 + 399 * 0.010), "as long as it may be"


def test_the_delay_is_as_uncertain_as_the_lengths() -> None:
    sharp, vague = (delay_law(busy(40, with_targets=0, variance=variance), 1) for variance in (0.0, 2500.0))
    assert sharp is not None and vague is not None
    assert sharp.mean_s == vague.mean_s == queue_delay_s(busy(40, with_targets=0), 1)
    assert sharp.sd_s == 0.0 < vague.sd_s
    assert vague.quantile(0.5) == vague.mean_s < vague.quantile(0.9)


def test_only_those_with_targets_are_before_a_request_with_one() -> None:
    alone, crowd = (predict(busy(40, with_targets=with_targets), request(), LEVEL) for with_targets in (1, 40))
    assert alone is not None and crowd is not None
    assert alone.ttft_s < 0.1 < crowd.ttft_s


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (request(slo=Slo(ttft_s=0.02)), "predicted time to the first token: 0.03 s, slo.ttft is 0.02 s"),
        (request(slo=Slo(tpot_s=0.009)), "predicted time of each further token: 0.01 s, slo.tpot is 0.009 s"),
        (request(deadline_s=1.0), "predicted time to the end: 1.03 s, deadline_s is 1 s"),
        (request(deadline_s=1.1, slo=Slo(0.04, 0.02)), ""),
    ],
)
def test_the_first_target_that_cannot_be_had_is_named(wanted: Request, words: str) -> None:
    predicted = predict(EMPTY, wanted, LEVEL)
    assert predicted is not None
    missed = missed_target(wanted, predicted)
    assert (missed.message if missed else "") == words


def test_errors_of_late_correct_what_is_predicted() -> None:
    check = TargetCheck()
    wanted = request(slo=Slo(ttft_s=0.05))
    assert check.look(EMPTY, wanted)[0] is None
    for _ in range(MIN_WAITS):
        check.errors.add(1.0, 2.0)
    missed, raw_s = check.look(EMPTY, wanted)
    assert missed is not None and missed.late_s == pytest.approx(0.01)
    assert raw_s == pytest.approx(0.030), "what is compared with the wait is not corrected already"
    errors = WaitErrors()
    for waited_s in range(1, 101):
        errors.add(1.0, float(waited_s))
    assert errors.factor == pytest.approx(95.05)


def test_where_nothing_is_measured_nothing_is_refused() -> None:
    for unknown in (dataclasses.replace(EMPTY, cost=None), dataclasses.replace(EMPTY, num_replicas=0)):
        assert TargetCheck().look(unknown, request(deadline_s=1e-6)) == (None, 0.0)
