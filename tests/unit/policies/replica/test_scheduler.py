"""The replica scheduler alone: events in, instructions out; workers that are taken over."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import StepCost
from farsight.core.decisions import unpack_decisions
from farsight.core.forecast import QUANTILES, Forecast, ForecastMade
from farsight.core.messages.plans import (
    CachedRun,
    FinishedSequence,
    KVCacheEvent,
    SlotProgress,
    StartedRequest,
    StepReport,
    WorkerReady,
)
from farsight.core.request import Origin, SequenceStatus
from farsight.policies.compose import build_scheduler
from farsight.policies.replica.events import (
    CacheTold,
    CostLearned,
    ForecastsArrived,
    RequestEnded,
    RequestGivenBack,
    RequestsAborted,
    RequestsArrived,
    RequestsRecalled,
    RequestStarted,
    SendPlan,
    WorkerConnected,
    WorkerLost,
    WorkerReported,
)
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.policies.settings import PolicySettings
from tests.unit.policies.replica.scheduler_harness import (
    LEASE,
    READY,
    Harness,
    ids,
    names,
    request,
    running,
    shipped,
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
    h.arrive(request("a"))  # a delivery that comes late
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
    h.arrive(request("c", attempt=1))
    h.handle(RequestsAborted((("a", 0), ("unknown", 0), ("c", 0))))
    assert h.admitted == ["b", "c"], "of an older attempt it leaves the newer alone"


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


def test_a_new_worker_life_gets_everything_again_in_order() -> None:
    h = Harness(max_num_seqs=2)
    h.arrive(request("a"), request("b"), request("c"))
    h.report(1, running("a", 2, 2), running("b", 1, 1))
    h.handle(WorkerConnected(state(ready=WorkerReady("w2", 10, 4, 40, True, 100), lease=1)))
    plan = h.plans[-1]
    assert (plan.worker_incarnation, plan.lease, plan.plan_seq) == ("w2", 1, 1)
    assert (h.admitted, h.standby) == (["a", "b"], ["c"])
    assert all(slot.request is not None for slot in plan.slots)


@pytest.mark.parametrize(("stalled", "short", "admitted", "standby"), [("b", 1, "acd", "b"), ("a", 4, "bc", "ad")])
def test_under_pressure_the_stalled_give_way_first_and_then_the_newest(
    stalled: str, short: int, admitted: str, standby: str
) -> None:
    h = Harness(standby_slots=4)
    h.arrive(*(request(name, out=12) for name in "abcd"))
    held = {"a": (4, 2) if stalled == "a" else (8, 3), "b": (8, 3), "c": (4, 2), "d": (4, 2)}
    h.report(1, *(running(name, *each, stalled=name == stalled) for name, each in held.items()), short=short)
    assert (h.admitted, set(h.standby)) == (list(admitted), set(standby))


def test_stalled_requests_are_not_admitted_and_others_overtake_them() -> None:
    h = Harness(max_num_seqs=1)
    h.arrive(request("a"), request("b"), request("c"))
    h.report(1, running("a", 1, 2), waiting("b", stalled=True), waiting("c"))
    h.report(2, waiting("b", stalled=True), waiting("c"), ended=("a",))
    assert (h.admitted, h.standby) == (["c"], ["b"])
    h.report(3, waiting("b"), ended=("c",))
    assert h.admitted == ["b"], "it is no longer stalled"


def test_a_stalled_victim_waits_until_its_client_reads() -> None:
    h = Harness(standby_slots=4)
    h.arrive(request("a", out=24), request("b", out=24))
    h.report(1, running("a", 16, 5, stalled=True), running("b", 16, 5), short=1)
    ordered = h.plans[-1].plan_seq
    h.report(2, waiting("a", 1, stalled=True), running("b", 17, 6), plan=ordered)
    assert h.admitted == ["b"]
    h.report(3, waiting("a", 1), running("b", 17, 6), plan=ordered)
    assert h.admitted == ["b", "a"]


def test_stalled_requests_give_up_their_kv_where_somebody_waits_for_it() -> None:
    h = Harness()
    h.arrive(request("big", prompt=36), request("b", prompt=8))
    h.report(1, running("big", 0, 10, stalled=True), waiting("b"))
    slots = {slot.request_id: slot for slot in h.plans[-1].slots}
    assert slots["big"].num_preemptions == 1
    h.report(2, waiting("big", 1, stalled=True), waiting("b"), plan=h.plans[-1].plan_seq)
    assert [slot.request_id for slot in h.plans[-1].slots if not slot.standby] == ["b"]


def test_in_a_plan_decodes_come_before_prefills_whatever_their_rank() -> None:
    """They need one token of the step's budget each, which a prefill before them would use up."""
    h = Harness()
    h.scheduler = build_scheduler(
        "fastserve", SchedulerLimits(8, 0), PolicySettings(SchedulerConfig(watermark=1.0, max_gap_ms=0.0))
    )
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


def test_what_a_worker_holds_is_adopted_and_not_shipped_again() -> None:
    held = (request("a"), running("a", 2, 2)), (request("b"), waiting("b", preemptions=3))
    h = Harness(worker=state(*held, ended=("z",)))
    h.arrive(request("c"))
    assert names(h) == ["a", "b", "c"]
    assert shipped(h) == ["c"]
    assert [slot.num_preemptions for slot in h.plans[-1].slots] == [0, 3, 0]
    assert (h.ended, ids(h, ("z", 0))) == ([], []), "it is known, but was not this Scheduler's"


def test_the_first_plan_after_a_take_over_names_everything_adopted() -> None:
    held = [(request("a", out=30), running("a", 20, 6)), *((request(n), waiting(n)) for n in "bcdef")]
    h = Harness(max_num_seqs=1, standby_slots=1, worker=state(*held))
    assert len(h.plans) == 1
    assert names(h) == list("abcdef"), "more than the standby window: what is not named is forgotten by the worker"
    assert h.admitted == ["a"]
    assert (h.plans[0].lease, h.plans[0].plan_seq) == (LEASE, 1)


def test_a_plan_after_a_take_over_knows_the_report_that_came_with_it() -> None:
    h = Harness(worker=state((request("a"), running("a", 2, 2)), report_seq=41))
    assert h.plans[-1].as_of_report_seq == 41
    h.report(0, ended=("a",))
    assert h.ended == [], "that one came with the take-over"
    h.report(1, ended=("a",))
    assert [end.finished.request_id for end in h.ended] == ["a"]


def test_the_adopted_that_run_are_admitted_whatever_admission_would_say_and_not_preempted() -> None:
    held = [(request(n, prompt=12), running(n, 1, 4)) for n in "ab"]  # 8 of 10 blocks, at the limit of 1 sequence
    h = Harness(max_num_seqs=1, worker=state(*held))
    assert h.admitted == ["a", "b"]
    assert [slot.num_preemptions for slot in h.plans[-1].slots] == [0, 0]


def test_the_order_of_the_worker_is_kept_and_goes_before_newcomers() -> None:
    h = Harness(max_num_seqs=2)
    h.handle(WorkerLost())
    h.arrive(request("new1"), request("new2"))
    h.handle(WorkerConnected(state((request("z"), running("z", 1, 2)), (request("m"), waiting("m")))))
    assert (h.admitted, h.standby) == (["z", "m"], ["new1", "new2"])


def test_an_adopted_request_that_the_scheduler_had_too_is_one_request() -> None:
    h = Harness()
    h.arrive(request("a"), request("b"))
    h.handle(WorkerConnected(state((request("a"), running("a", 1, 2)), lease=LEASE + 1)))
    assert names(h) == ["a", "b"]
    assert shipped(h) == ["b"], "the worker had never got it"


def test_a_newcomer_of_a_higher_attempt_replaces_the_held_one_and_is_shipped() -> None:
    h = Harness()
    h.handle(WorkerLost())
    h.arrive(request("a", out=9, attempt=1, resumed=3))
    h.handle(WorkerConnected(state((request("a", out=9), running("a", 5, 3)))))
    (slot,) = h.plans[-1].slots
    assert (slot.attempt, slot.request) == (1, request("a", out=9, attempt=1, resumed=3))
    h.handle(WorkerConnected(state((request("a", attempt=2), running("a", 1, 2, attempt=2)), lease=LEASE + 1)))
    assert [(slot.attempt, slot.request) for slot in h.plans[-1].slots] == [(2, None)], "nor is a lower one newer"


def test_a_newcomer_that_does_not_fit_the_worker_is_refused_when_it_connects() -> None:
    h = Harness()
    h.handle(WorkerLost())
    h.arrive(request("long", prompt=40, out=4), request("b"))
    assert h.refused == []
    h.handle(WorkerConnected(state()))
    assert [refusal.request_id for refusal in h.refused] == ["long"]
    assert h.admitted == ["b"]


def test_ends_that_a_worker_still_reports_are_ends_of_what_the_scheduler_had() -> None:
    h = Harness()
    h.arrive(request("a"))
    h.handle(WorkerConnected(state(ended=("a",), lease=LEASE + 1)))
    assert [end.finished.request_id for end in h.ended] == ["a"]
    assert h.scheduler.num_admitted + h.scheduler.num_waiting == 0


def test_a_lost_worker_takes_everything_with_it() -> None:
    h = Harness(max_num_seqs=1)
    h.arrive(request("a"), request("b"))
    plans = len(h.plans)
    h.handle(WorkerLost())
    assert h.scheduler.num_admitted + h.scheduler.num_waiting == 0
    assert ids(h, ("a", 0), ("b", 0)) == ["a", "b"]
    h.report(1, ended=("a",))
    h.arrive(request("c"))
    assert (h.ended, len(h.plans)) == ([], plans), "no worker: nothing to hear and no component to tell"


@pytest.mark.parametrize("lease", [LEASE - 1, LEASE + 1])
def test_reports_under_another_lease_are_ignored(lease: int) -> None:
    h = Harness()
    h.arrive(request("a"))
    h.report(7, running("a", 1, 2), ended=("a",), lease=lease)
    assert h.ended == []
    h.report(1, ended=("a",))
    assert len(h.ended) == 1


def test_a_resumed_request_counts_its_known_output_when_it_is_admitted() -> None:
    h = Harness()
    h.arrive(request("a", prompt=4, out=30, resumed=20), request("b", prompt=16, out=1), request("c"))
    assert h.admitted == ["a", "b"], "6 blocks and 4 of 10"


def test_attempts_that_are_here_are_known_up_to_the_current_one() -> None:
    h = Harness(max_num_seqs=1)
    h.arrive(request("a", attempt=1), request("b"))
    assert ids(h, ("a", 0), ("a", 1), ("b", 0)) == []
    assert h.scheduler.unknown((("a", 2), ("c", 0))) == (("a", 2), ("c", 0))
    h.handle(RequestsAborted((("a", 1),)))
    assert ids(h, ("a", 1), ("b", 0)) == ["a"]


def test_what_ended_lately_is_known_that_attempt_alone() -> None:
    h = Harness()
    h.arrive(request("a"))
    h.report(1, ended=("a",))
    assert h.scheduler.unknown((("a", 0), ("a", 1))) == (("a", 1),)
    h.handle(WorkerLost())
    assert ids(h, ("a", 0)) == [], "its last tokens may be on their way, the worker dead or not"


def test_only_so_many_ends_are_remembered_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farsight.policies.replica.mirror.NUM_REMEMBERED", 3)
    h = Harness()
    for seq, name in enumerate("abcde", start=1):
        h.arrive(request(name))
        h.report(seq, ended=(name,))
    assert ids(h, *((name, 0) for name in "abcde")) == ["a", "b"]


def test_few_requests_that_fit_at_their_limits_are_admitted_and_nothing_is_ranked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h = Harness(preset="farsight")
    asked: list[str] = []
    monkeypatch.setattr(h.scheduler.order, "refresh", lambda now: asked.append("order"))
    h.arrive(*(request(name) for name in "abc"))  # at most 24 tokens of 40
    assert (h.admitted, asked) == (["a", "b", "c"], [])
    h.arrive(request("long", prompt=12, out=12))
    assert asked == ["order"]


def test_only_what_no_plan_has_named_is_given_back() -> None:
    h = Harness(max_num_seqs=1, standby_slots=1)
    h.arrive(*(request(name) for name in "abcd"))
    asked = RequestsRecalled((("a", 0), ("b", 0), ("c", 0), ("d", 1), ("stranger", 0)))
    assert h.handle(asked) == [RequestGivenBack(request("c"), None)], "a runs, b stands by, d is an earlier attempt"
    assert h.scheduler.num_waiting == 2
    assert ids(h, ("a", 0), ("b", 0), ("c", 0), ("d", 0)) == ["c"]
    h.arrive(request("c"))
    assert ids(h, ("c", 0)) == [], "it may come back"


def test_a_request_that_is_given_back_takes_its_account_along() -> None:
    h = Harness(max_num_seqs=1, standby_slots=0)
    origin = Origin("cmpl-1")
    h.arrive(request("a"), dataclasses.replace(request("b"), origin=origin))
    [given] = h.handle(RequestsRecalled((("b", 0),)))
    assert isinstance(given, RequestGivenBack) and given.account is not None
    assert [each.kind for each in unpack_decisions(given.account.decisions)] == ["arrived", "waits", "recalled"]
    assert h.closed == [], "its decisions are logged where it ends"
