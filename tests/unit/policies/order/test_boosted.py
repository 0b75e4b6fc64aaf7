"""The boosted order: what a boost is, who may overtake whom, and that streams go on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import StepCost
from farsight.core.forecast import Forecast
from farsight.policies.interfaces import Job
from farsight.policies.order.boosted import DEVIATIONS, SPREAD, Boosted, boosts
from farsight.policies.order.gittins import DecodePrice
from farsight.policies.replica.events import Event, Instruction
from farsight.policies.replica.scheduler import ReplicaScheduler
from farsight.policies.settings import PolicySettings
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.predictors import Noisy
from farsight.simulator.traffic.workload import SimRequest
from tests.unit.policies.closed_loops import CLIENTS, one_replica, run_beside

STEP = StepCost(base_s=0.010, prefill_token_s=0.1e-3, decode_seq_s=0.1e-3, context_token_s=0.0)


def job(name: str, length: float, arrived_at: float = 0.0, **fields: object) -> Job:
    forecast = Forecast(mean=length, quantiles=(length,) * 6, num_samples=1, source="test", version=0)
    values = {"prompt_len": 100, "max_new_tokens": 4096, "forecast": forecast} | fields
    return Job(request_id=name, arrived_at=arrived_at, **values)  # type: ignore[arg-type]


def order_of(*jobs: Job, tail: float = 1.0, max_boost_s: float = 60.0) -> Boosted:
    order = Boosted(DecodePrice(STEP, 64, 10_000), tail=tail, max_boost_s=max_boost_s)
    for each in jobs:
        order.add(each, each.arrived_at)
    return order


def pausing(**options: float) -> Boosted:
    """Two places, and streams that may stand for 0.4 s."""
    return Boosted(DecodePrice(STEP, 2, 100_000), tail=0.01, max_boost_s=1e4, **({"max_pause_s": 0.4} | options))


def names(order: Boosted, now: float = 100.0) -> list[str]:
    order.check_integrity()
    return [each.request_id for each in order.ranked(now)]


def test_a_boost_is_that_of_the_rule_between_nothing_and_the_most() -> None:
    ranks = np.array([1e-12, 0.1, 1.0, 10.0, 1000.0])
    rule = [-2.0 * math.log(1 - math.exp(-rank / 2.0)) for rank in ranks[1:]]
    np.testing.assert_allclose(boosts(ranks, 2.0, 5.0), [5.0, min(5.0, rule[0]), *rule[1:]], atol=1e-12)
    assert boosts(ranks, 2.0, 5.0)[-1] == 0.0


def test_the_tail_decides_between_size_and_arrival() -> None:
    old, young = job("old", 2000.0, 0.0), job("young", 10.0, 20.0)
    assert names(order_of(old, young, tail=0.01, max_boost_s=1e4)) == ["young", "old"]
    assert names(order_of(old, young, tail=100.0)) == ["old", "young"]


def test_a_longer_backlog_lets_small_jobs_pass_more() -> None:
    old, young = job("old", 500.0, 0.0), job("young", 10.0, 1.0)
    order = order_of(old, young, max_boost_s=1e6)
    assert names(order) == ["old", "young"]
    crowd = [job(f"long{number}", 4000.0, 2.0) for number in range(50)]
    for each in crowd:
        order.add(each, 2.0)
    assert names(order)[:2] == ["young", "old"]
    for each in crowd:
        order.remove(each)
    assert names(order) == ["old", "young"]


def test_memory_that_nobody_fills_changes_nothing() -> None:
    step = StepCost(base_s=0.002, prefill_token_s=0.5e-3, decode_seq_s=0.5e-3, context_token_s=1e-6)
    jobs = [job("long", 2000.0, 0.0), *(job(f"short{number}", 20.0, 5.0 + number) for number in range(8))]
    orders = [Boosted(DecodePrice(step, 8, capacity), tail=0.1, max_boost_s=1e4) for capacity in (20_000, 2_000_000)]
    for order in orders:
        for each in jobs:
            order.add(each, each.arrived_at)
    assert names(orders[0]) == names(orders[1])
    assert names(orders[1])[-1] == "long", "its tokens take steps of 8 jobs, not of a memory that is never full"


@pytest.mark.parametrize("tail", [0.5, 1.0, 4.0])
def test_the_yardstick_is_nine_deviations_of_the_backlog(tail: float) -> None:
    order = order_of(*(job(str(number), 500.0) for number in range(4)), tail=tail, max_boost_s=1e6)
    names(order)
    of_four_s = order.yardstick_s
    each_s = float(order.explain(job("0", 500.0), 0.0)["expected_s"])
    assert of_four_s == pytest.approx(DEVIATIONS * each_s * math.sqrt(4) / tail)
    for number in range(4, 16):
        order.add(job(str(number), 500.0), 0.0)
    names(order)
    assert order.yardstick_s == pytest.approx(2 * of_four_s), "four times the requests, the root of four the yardstick"


def test_without_a_backlog_the_yardstick_is_next_to_nothing() -> None:
    order = order_of(job("runs", 500.0, output_len=3, computed_len=102))
    names(order)
    assert 0 < order.yardstick_s < 1e-6


def test_streams_go_on_then_come_back_and_then_others_start() -> None:
    newcomer = job("new", 1.0, 0.0)
    running = job("runs", 4000.0, 50.0, output_len=3, computed_len=102)
    moved_out = job("out", 3000.0, 40.0, output_len=3, host_len=102)
    prefills = job("prefills", 1.0, 60.0, computed_len=64)
    order = order_of(newcomer, moved_out, running, prefills, tail=100.0)
    assert names(order) == ["runs", "out", "new", "prefills"]
    urgent = job("urgent", 4000.0, 70.0, priority=-1)
    order.add(urgent, 70.0)
    assert names(order)[0] == "urgent"


def test_streams_take_turns_and_none_stands_for_longer_than_the_pause() -> None:
    order = pausing()
    long = [job(f"long{number}", 300.0, 9.9, output_len=40, computed_len=139) for number in range(2)]
    for each in [*long, *(job(f"new{number}", 2.0, 10.0) for number in range(50))]:
        order.add(each, 10.0)
    for each in long:
        order.ran(each, 0.1, 10.0)
    assert names(order, 10.1)[-2:] == ["long0", "long1"]
    order.ran(long[0], 0.1, 10.3)
    assert names(order, 10.45)[:2] == ["long1", "new0"], "who has stood still for 0.4 s goes first ..."
    order.ran(long[1], 0.1, 10.5)
    assert names(order, 10.5)[-2:] == ["long0", "long1"], "... until it has run"
    order.among(long, 11.0)
    assert names(order, 11.0)[:2] == ["long0", "long1"], "not the order of an earlier instant"


def test_a_turn_asks_for_no_bonus_of_residents() -> None:
    order = pausing(theta=4.0)
    stream = job("stream", 80.0, 9.9, output_len=40, computed_len=139)
    order.add(stream, 9.9)
    order.ran(stream, 0.1, 10.0)
    order.add(job("new", 30.0, 10.0), 10.0)
    assert names(order, 10.0) == ["new", "stream"], "a quarter less to do is enough where no KV is moved for it"


@pytest.mark.parametrize(("max_pause_s", "first"), [(0.4, "new"), (0.0, "stands")])
def test_where_streams_stand_still_the_law_counts_those_that_go_on(max_pause_s: float, first: str) -> None:
    order = pausing(theta=1.0, max_pause_s=max_pause_s)
    unknown: dict[str, Any] = {"length": 1.0, "forecast": None, "max_new_tokens": 600}
    for number in range(4):
        order.add(job(f"goes-on{number}", **unknown, output_len=300, computed_len=399), 0.0)
    order.add(job("stands", **unknown, output_len=40, computed_len=139), 0.0)
    order.add(job("new", **unknown, prompt_len=1000), 0.0)
    for number in range(50):
        ended = job(f"short{number}", **unknown, output_len=10)
        order.add(ended, 0.0)
        order.remove(ended)
        order.learn(ended, censored=False)
    ranked = [name for name in names(order, 0.1) if not name.startswith("goes-on")]
    assert ranked[0] == first, "by the ended ones alone, which were short, it would be about to end"


@pytest.mark.parametrize(("num_streams", "prompt_len"), [(9, 100), (2, 40_000)])
def test_streams_go_on_where_too_many_have_begun_or_memory_is_short(num_streams: int, prompt_len: int) -> None:
    order = pausing()
    crowd = {"prompt_len": prompt_len, "output_len": 40, "computed_len": prompt_len + 39, "max_new_tokens": 9000}
    for number in range(num_streams):
        order.add(job(f"long{number}", 3000.0, **crowd), 0.0)
    order.add(job("new", 2.0, 10.0), 10.0)
    assert names(order, 10.1)[-1] == "new"


def overtakes(ranked: Iterator[Job], max_boost_s: float) -> list[str]:
    """Those of equal urgency that go before a job that came more than ``max_boost_s`` earlier, none having begun."""
    latest, guilty = -math.inf, []
    for each in ranked:
        if each.output_len == 0:
            if latest > each.arrived_at + max_boost_s + 1e-9:
                guilty.append(each.request_id)
            latest = max(latest, each.arrived_at)
    return guilty


@given(
    st.lists(st.tuples(st.floats(0, 500), st.floats(1, 4000), st.booleans()), min_size=1, max_size=40),
    st.floats(0.01, 20),
    st.floats(0.1, 200),
)
def test_only_those_that_came_within_the_most_may_overtake(
    crowd: list[tuple[float, float, bool]], tail: float, max_boost_s: float
) -> None:
    """After each arrival and each end, so with every backlog on the way."""
    order = order_of(tail=tail, max_boost_s=max_boost_s)
    jobs = [
        job(str(number), length, at, computed_len=64 if partly else 0)
        for number, (at, length, partly) in enumerate(sorted(crowd))
    ]
    for each in jobs:
        order.add(each, each.arrived_at)
        assert not overtakes(order.ranked(each.arrived_at), max_boost_s)
    for each in jobs:
        order.remove(each)
        assert not overtakes(order.ranked(500.0), max_boost_s)


MAX_BOOST_S = 3.0


def watched(scheduler: ReplicaScheduler) -> ReplicaScheduler:
    """Checks at each scheduling point that nothing starts before a job that it may not overtake."""
    handle, order = scheduler.handle, scheduler.order
    assert isinstance(order, Boosted)
    order._max_boost_s = MAX_BOOST_S

    def heard(event: Event, now: float) -> list[Instruction]:
        before = set(scheduler._mirror.admitted)
        out = handle(event, now)
        waiting = [each for name, each in scheduler._mirror.requests.items() if name not in scheduler._mirror.admitted]
        oldest = min((each.arrived_at for each in waiting if each.output_len == 0), default=math.inf)
        for name, each in scheduler._mirror.admitted.items():
            assert name in before or each.output_len or each.arrived_at <= oldest + MAX_BOOST_S
        assert not overtakes(order.ranked(now), MAX_BOOST_S)
        return out

    scheduler.handle = heard  # type: ignore[method-assign]
    return scheduler


def test_a_closed_loop_of_short_requests_does_not_starve_a_long_one() -> None:
    settings = PolicySettings(SchedulerConfig(watermark=1.0, tail=0.01, max_gap_ms=0.0), cost=STEP)
    fleet = one_replica("farsight", settings, clients=CLIENTS, admission="watermark", watched=watched)
    long, overloaded_until = run_beside(fleet, 600)
    assert overloaded_until > 2 * MAX_BOOST_S, "the overload has to last"
    assert long.ttft_s < MAX_BOOST_S + 24 * STEP.prefill_s(32) * 4, "and one turn of all"
    assert long.max_gap_s < 0.1, "a stream that has begun goes on"


@pytest.mark.parametrize(("max_pause_s", "least", "most"), [(0.0, 0.0, 0.1), (0.2, 0.15, 0.3)])
def test_streams_stand_still_for_newcomers_no_longer_than_the_pause(
    max_pause_s: float, least: float, most: float
) -> None:
    shape = ReplicaShape(400, 16, num_host_blocks=40, max_num_seqs=2, look_every=1)
    settings = PolicySettings(
        SchedulerConfig(watermark=1.0, tail=0.01, max_pause_s=max_pause_s, max_gap_ms=0.0), cost=STEP
    )
    fleet = one_replica("farsight", settings, shape, order="boosted", admission="watermark")
    long = [SimRequest(f"long{number}", 0.0, 32, 200, 400) for number in range(2)]
    short = [SimRequest(f"short{number}", 0.5, 32, 2, 400) for number in range(200)]
    pauses_s = [each.max_gap_s for each in fleet.run(Noisy(0.1, 1)([*long, *short])).done if each.num_tokens == 200]
    assert len(pauses_s) == 2
    assert least <= max(pauses_s) < most


def test_it_says_what_a_boost_comes_from() -> None:
    order = order_of(each := job("a", 100.0))
    names(order)
    facts = order.explain(each, 0.0)
    assert facts["yardstick_s"] == pytest.approx(min(DEVIATIONS * float(facts["expected_s"]), 60.0 / SPREAD))
    assert 0 < float(facts["boost_s"]) <= 60.0
