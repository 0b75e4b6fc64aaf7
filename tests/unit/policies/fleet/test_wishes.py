"""Predicted times of a request that comes now, beside what its client wants."""

from __future__ import annotations

import dataclasses

import pytest

from core.costs import StepCost
from core.forecast import QUANTILES, Forecast
from core.load_snapshot import Demand, LoadSnapshot
from core.request import NO_SLO, Request, SamplingParams, Slo
from policies.fleet.queue_delay import delay_law, predict, queue_delay_s
from policies.fleet.wishes import LEVEL, MIN_WAITS, WaitErrors, WishCheck, missed_wish

COST = StepCost(0.010, 0.0001, 0.0, 0.0)
"""A step takes 10 ms, and 0.1 ms a prompt token more."""

EMPTY = LoadSnapshot(Demand(0, 0, 0, 0, 0, 0), 1, 4, 10_000, joins=True, cost=COST)


def busy(num: int, *, wishing: int, variance: float = 0.0) -> LoadSnapshot:
    """So many requests of 100 prompt tokens and 100 output tokens; four run at once."""
    demand = Demand(num, 0, 1, 100.0 * num, 0, 100.0 * num, variance * num, wishing)
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
    sharp, vague = (delay_law(busy(40, wishing=0, variance=variance), 1) for variance in (0.0, 2500.0))
    assert sharp is not None and vague is not None
    assert sharp.mean_s == vague.mean_s == queue_delay_s(busy(40, wishing=0), 1)
    assert sharp.sd_s == 0.0 < vague.sd_s
    assert vague.quantile(0.5) == vague.mean_s < vague.quantile(0.9)


def test_only_those_with_wishes_are_before_a_request_with_one() -> None:
    alone, crowd = (predict(busy(40, wishing=wishing), request(), LEVEL) for wishing in (1, 40))
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
def test_the_first_wish_that_cannot_be_had_is_named(wanted: Request, words: str) -> None:
    predicted = predict(EMPTY, wanted, LEVEL)
    assert predicted is not None
    missed = missed_wish(wanted, predicted)
    assert (missed.message if missed else "") == words


def test_errors_of_late_correct_what_is_predicted() -> None:
    check = WishCheck()
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
        assert WishCheck().look(unknown, request(deadline_s=1e-6)) == (None, 0.0)
