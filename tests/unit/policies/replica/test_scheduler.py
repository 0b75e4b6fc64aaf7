"""The replica scheduler alone: events in, instructions out."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from core.costs import StepCost
from core.forecast import QUANTILES, Forecast
from core.messages.cache import CachedRun, KVCacheEvent, StartedRequest
from core.messages.forecasts import ForecastMade
from core.messages.plans import FinishedSequence, SlotProgress, StepReport, WorkerReady
from core.request import SequenceStatus
from policies.compose import build_scheduler
from policies.replica.events import (
    CacheTold,
    CostLearned,
    ForecastsArrived,
    RequestEnded,
    RequestsAborted,
    RequestsArrived,
    RequestStarted,
    SendPlan,
    WorkerConnected,
    WorkerReported,
)
from policies.replica.scheduler import SchedulerLimits
from policies.settings import PolicySettings
from tests.unit.policies.replica.scheduler_harness import (
    LEASE,
    READY,
    Harness,
    request,
    running,
    state,
    told,
    waiting,
)


def test_arrivals_are_admitted_in_order_and_the_next_ones_ship_as_standby() -> None:
    h = Harness(max_num_seqs=2)
    h.arrive(*(request(name) for name in "abcde"))
    assert (h.admitted, h.standby) == (["a", "b"], ["c", "d"])
    assert h.plans[-1].slots[0].length_to == 8
    assert all(slot.request is not None for slot in h.plans[-1].slots)


def test_a_duplicate_delivery_changes_nothing() -> None:
    h = Harness()
    h.arrive(request("a"))
    plans = len(h.plans)
    h.arrive(request("a"))
    assert len(h.plans) == plans


def test_admission_stops_at_the_head_of_the_line() -> None:
    h = Harness()
    h.arrive(request("a", prompt=16), request("big", prompt=28), request("small", prompt=4))
    assert (h.admitted, h.standby) == (["a"], ["big", "small"])


def test_payloads_ship_until_the_worker_has_applied_a_plan_with_them() -> None:
    h = Harness()
    h.arrive(request("a"))
    h.arrive(request("b"))
    assert [slot.request is not None for slot in h.plans[-1].slots] == [True, True]
    h.report(1, running("a", 1, 2), plan=h.plans[-2].plan_seq)  # the plan before: has a, not b
    h.arrive(request("c"))
    assert [slot.request is not None for slot in h.plans[-1].slots] == [False, True, True]


def test_an_end_is_told_once_and_lets_the_next_in() -> None:
    h = Harness(max_num_seqs=1)
    h.arrive(request("a"), request("b"))
    h.report(1, ended=("a",))
    h.report(2, ended=("a",))
    assert [(end.finished.request_id, end.arrived_at) for end in h.ended] == [("a", 2.0)]
    assert h.admitted == ["b"]
    assert h.plans[-1].as_of_report_seq == h.first_report + 1


def test_reports_out_of_order_or_of_another_life_are_ignored() -> None:
    h = Harness(max_num_seqs=1)
    h.arrive(request("a"), request("b"))
    h.report(5)
    h.report(4, ended=("a",))
    assert h.ended == []
    ended = (FinishedSequence("a", 0, SequenceStatus.FINISHED_STOPPED, 1),)
    foreign = StepReport("other", LEASE, 9, 1, 0, 0, (), ended, ())
    h.handle(WorkerReported(foreign))
    assert h.ended == []


def test_an_abort_takes_a_shipped_request_out_of_the_plan() -> None:
    h = Harness()
    h.arrive(request("a"), request("b"))
    h.handle(RequestsAborted((("a", 0), ("unknown", 0))))
    assert h.admitted == ["b"]


def test_an_abort_of_an_older_attempt_leaves_the_newer_alone() -> None:
    h = Harness()
    h.arrive(request("a", attempt=1))
    h.handle(RequestsAborted((("a", 0),)))
    assert h.admitted == ["a"]


def test_a_request_that_never_fits_is_refused_with_the_numbers() -> None:
    h = Harness()
    h.arrive(request("a", prompt=30, out=11))
    assert [(r.request_id, r.field) for r in h.refused] == [("a", "max_tokens")]
    assert "41 tokens" in h.refused[0].message
    assert "at most 40" in h.refused[0].message


def test_pressure_preempts_the_newest_once_and_puts_it_in_front() -> None:
    h = Harness(standby_slots=1)
    h.arrive(*(request(name, out=12) for name in "abcd"))
    full = (running("a", 8, 3), running("b", 8, 3), running("c", 4, 2), running("d", 4, 2))
    h.report(1, *full, short=1)
    assert (h.admitted, h.standby) == (["a", "b", "c"], ["d"])
    assert {slot.request_id: slot.num_preemptions for slot in h.plans[-1].slots} == {"a": 0, "b": 0, "c": 0, "d": 1}
    answered = len(h.plans)
    h.report(2, *full, short=1, plan=1)  # the worker had not seen the new plan yet
    assert len(h.plans) == answered


def test_a_standby_started_by_the_worker_counts_as_admitted() -> None:
    h = Harness(max_num_seqs=1)
    h.arrive(request("a"), request("b"))
    h.report(1, running("b", 1, 1), ended=("a",))
    assert h.admitted == ["b"]


def test_a_new_worker_life_gets_everything_again_in_order() -> None:
    h = Harness(max_num_seqs=2)
    h.arrive(request("a"), request("b"), request("c"))
    h.report(1, running("a", 2, 2), running("b", 1, 1))
    h.handle(WorkerConnected(state(ready=WorkerReady("w2", 10, 4, 40, True, 100), lease=1)))
    plan = h.plans[-1]
    assert (plan.worker_incarnation, plan.lease, plan.plan_seq) == ("w2", 1, 1)
    assert (h.admitted, h.standby) == (["a", "b"], ["c"])
    assert all(slot.request is not None for slot in plan.slots)


def test_under_pressure_the_stalled_give_way_first() -> None:
    h = Harness(standby_slots=4)
    h.arrive(*(request(name, out=12) for name in "abcd"))
    h.report(1, running("a", 8, 3), running("b", 8, 3, stalled=True), running("c", 4, 2), running("d", 4, 2), short=1)
    assert (h.admitted, h.standby) == (["a", "c", "d"], ["b"])


def test_after_the_stalled_the_newest_give_way() -> None:
    h = Harness(standby_slots=4)
    h.arrive(*(request(name, out=12) for name in "abcd"))
    h.report(1, running("a", 4, 2, stalled=True), running("b", 8, 3), running("c", 4, 2), running("d", 4, 2), short=4)
    assert (h.admitted, set(h.standby)) == (["b", "c"], {"a", "d"})


def test_stalled_requests_are_not_admitted_and_others_overtake_them() -> None:
    h = Harness(max_num_seqs=1)
    h.arrive(request("a"), request("b"), request("c"))
    h.report(1, running("a", 1, 2), waiting("b", stalled=True), waiting("c"))
    h.report(2, waiting("b", stalled=True), waiting("c"), ended=("a",))
    assert (h.admitted, h.standby) == (["c"], ["b"])


def test_a_request_no_longer_stalled_is_admitted() -> None:
    h = Harness()
    h.arrive(request("big", prompt=37, out=3), request("b"))
    h.report(1, running("big", 1, 10), waiting("b", stalled=True))
    h.report(2, waiting("b", stalled=True), ended=("big",))
    assert h.scheduler.num_admitted == 0
    h.report(3, waiting("b"))
    assert h.admitted == ["b"]


def test_a_stalled_victim_waits_until_its_client_reads() -> None:
    h = Harness(standby_slots=4)
    h.arrive(request("a", out=24), request("b", out=24))
    h.report(1, running("a", 16, 5, stalled=True), running("b", 16, 5), short=1)
    ordered = h.plans[-1].plan_seq
    h.report(2, waiting("a", 1, stalled=True), running("b", 17, 6), plan=ordered)
    assert h.admitted == ["b"]
    h.report(3, waiting("a", 1), running("b", 17, 6), plan=ordered)
    assert h.admitted == ["b", "a"]


def test_stalled_requests_take_nobodys_place() -> None:
    h = Harness(max_num_seqs=1)
    h.arrive(request("a"), request("b"))
    h.report(1, running("a", 1, 2, stalled=True), waiting("b"))
    assert "b" in [slot.request_id for slot in h.plans[-1].slots if not slot.standby]


def test_stalled_requests_give_up_their_kv_where_somebody_waits_for_it() -> None:
    h = Harness()
    h.arrive(request("big", prompt=36), request("b", prompt=8))
    h.report(1, running("big", 0, 10, stalled=True), waiting("b"))
    slots = {slot.request_id: slot for slot in h.plans[-1].slots}
    assert slots["big"].num_preemptions == 1
    h.report(2, waiting("big", 1, stalled=True), waiting("b"), plan=h.plans[-1].plan_seq)
    assert [slot.request_id for slot in h.plans[-1].slots if not slot.standby] == ["b"]


def test_a_duplicate_that_comes_after_the_end_does_not_run_again() -> None:
    h = Harness()
    h.arrive(request("a"))
    h.report(1, ended=("a",))
    h.arrive(request("a"))
    assert h.scheduler.num_waiting + h.scheduler.num_admitted == 0


def test_in_a_plan_decodes_come_before_prefills_whatever_their_rank() -> None:
    """They need one token of the step's budget each, which a prefill before them would use up."""
    h = Harness()
    h.scheduler = build_scheduler("fastserve", SchedulerLimits(8, 0), PolicySettings(watermark=1.0))
    h.handle(WorkerConnected(state()))
    h.arrive(request("old", out=16))
    h.report(1, dataclasses.replace(running("old", 1, 2), ran_s=100.0))
    h.arrive(request("new"))
    assert [job.request_id for job in h.scheduler.order.ranked(h.now)] == ["new", "old"]
    assert h.admitted == ["old", "new"]


def test_a_forecast_changes_the_order_of_those_that_wait() -> None:
    scheduler = build_scheduler("farsight", SchedulerLimits(1, standby_slots=0))
    scheduler.handle(WorkerConnected(state()), 0.0)
    scheduler.handle(RequestsArrived((request("long", out=30), request("short", out=30))), 1.0)

    def foresee(name: str, attempt: int, length: float) -> list[str]:
        forecast = Forecast(length, (length,) * len(QUANTILES), 1, "test", 1)
        out = scheduler.handle(ForecastsArrived((ForecastMade(name, attempt, forecast),)), 2.0)
        scheduler.check_integrity()
        return [slot.request_id for each in out if isinstance(each, SendPlan) for slot in each.plan.slots]

    assert foresee("long", 1, 1.0) == foresee("unknown", 0, 1.0) == []  # another attempt, another request
    assert foresee("long", 0, 30.0)[0] == "short"
    assert foresee("long", 0, 1.0)[0] == "long"


@pytest.mark.parametrize(
    ("lead_s", "first_grant", "renewed_after"),
    [(0.0, 4 + 2, 2), (0.3, 4 + 6, 3)],
    ids=["when it is used up", "before, where reports take their time"],
)
def test_a_grant_is_renewed(lead_s: float, first_grant: int, renewed_after: int) -> None:
    """Two want one place; a token takes 0.1 s, and the first quantum that holds one is 0.16 s."""
    worker = state(ready=dataclasses.replace(READY, num_blocks=100, max_model_len=400))
    h = Harness(max_num_seqs=1, worker=worker, preset="fastserve-recompute", grant_lead_s=lead_s)
    h.handle(CostLearned(StepCost(0.1, 0.0, 0.0, 0.0)))
    h.arrive(request("a", out=60), request("b", out=60))
    (slot,) = [slot for slot in h.plans[-1].slots if slot.request_id == "a"]
    assert slot.length_to == first_grant
    num_plans = len(h.plans)
    for output in range(1, renewed_after):
        h.report(output, dataclasses.replace(running("a", output, 3), ran_s=0.0))
        assert len(h.plans) == num_plans, f"{output} tokens: enough is left"
    h.report(renewed_after, dataclasses.replace(running("a", renewed_after, 3), ran_s=0.0))
    assert len(h.plans) == num_plans + 1


def test_a_profile_that_prices_context_alone_prices_an_empty_batch() -> None:
    h = Harness(grant_lead_s=0.1)
    h.handle(CostLearned(StepCost(0.0, 0.0, 0.0, 1e-5)))
    h.arrive(request("a"))
    assert h.admitted == ["a"]


def test_a_start_is_told_once_with_what_was_found_and_how_long_it_waited() -> None:
    h = Harness()
    h.arrive(request("a", 8, 8))  # at 2.0
    running = SlotProgress("a", 0, SequenceStatus.RUNNING, 0, 8, 1, 3, False, cached_len=4, ran_s=1.5)
    first = told(h, StepReport("w", LEASE, 2, 1, 7, 0, (running,), (), ()))
    assert first == [RequestStarted(StartedRequest("a", 0, 4, queue_s=6.5))]
    end = FinishedSequence("a", 0, SequenceStatus.FINISHED_LENGTH, 8, 4, 2.0)
    (ended,) = told(h, StepReport("w", LEASE, 3, 1, 7, 0, (), (end,), ()))
    assert isinstance(ended, RequestEnded)


def test_who_starts_and_ends_between_two_reports_is_told_of_in_this_order() -> None:
    h = Harness()
    h.arrive(request("a", 8, 2))
    notice = KVCacheEvent(1, True, (CachedRun(0, (5, 6)),))
    end = FinishedSequence("a", 0, SequenceStatus.FINISHED_LENGTH, 2, 4, 1.0)
    cache, start, ended = told(h, StepReport("w", LEASE, 2, 1, 7, 0, (), (end,), (), cache=(notice,)))
    assert (cache, start) == (CacheTold(notice), RequestStarted(StartedRequest("a", 0, 4, queue_s=7.0)))
    assert isinstance(ended, RequestEnded), "what it left in the cache comes before its end"


def test_what_waiting_requests_would_find_follows_the_cache() -> None:
    h = Harness(1, preset="preble")
    late = replace(request("late", 9, 4), prefix_hashes=(5, 6))
    full = replace(request("full", 8, 4), prefix_hashes=(5, 6))
    h.arrive(request("first", 4, 4), late, full)
    jobs = {name: h.scheduler._mirror.requests[name] for name in ("late", "full")}
    steps = [
        (KVCacheEvent(1, True, (CachedRun(0, (5,)),)), 4, 4),
        (KVCacheEvent(2, False, (CachedRun(5, (6,)),)), 8, 4),
    ]
    steps += [(KVCacheEvent(3, False, (), (6,)), 4, 4), (KVCacheEvent(5, False, (CachedRun(5, (6,)),)), 4, 4)]
    for seq, (notice, late_len, full_len) in enumerate(steps, 2):
        h.handle(WorkerReported(StepReport("w", LEASE, seq, 1, 7, 0, (), (), (), cache=(notice,))))
        assert (jobs["late"].cached_len, jobs["full"].cached_len) == (late_len, full_len)
    assert h.scheduler.cache.missed, "the fourth is missing"
    assert h.scheduler.cache.whole() is None
