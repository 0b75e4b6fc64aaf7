"""What is told of decisions: of every preset, within bounds, and on the operator's pages."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import pytest

from farsight.core.decisions import Decision, unpack_decisions
from farsight.core.forecast import QUANTILES, Forecast, ForecastMade
from farsight.core.messages.live import MemoryPoint
from farsight.core.messages.plans import FinishedSequence, Plan, WorkerReady, WorkerState
from farsight.core.request import Origin, Request, SamplingParams, SequenceStatus
from farsight.kvcache import BatchLimits, BlockManager, LeaseExecutor
from farsight.policies.compose import build_scheduler
from farsight.policies.presets import PRESETS
from farsight.policies.replica.decision_trace import Accounts
from farsight.policies.replica.events import (
    AccountClosed,
    Event,
    ForecastsArrived,
    RefuseRequest,
    RequestEnded,
    RequestsAborted,
    RequestsArrived,
    SendPlan,
    WorkerConnected,
    WorkerLost,
    WorkerReported,
)
from farsight.policies.replica.live_view import MAX_ENDED, MAX_POINTS, SchedulerWatch
from farsight.policies.replica.scheduler import SchedulerLimits
from tests.unit.policies.replica.scheduler_harness import Harness, running
from tests.unit.policies.replica.scheduler_harness import request as small_request

CONTINUOUS = [name for name, preset in PRESETS.items() if preset.mode == "continuous"]
BLOCK = 8
STEP_S = 0.02
FORECAST = Forecast(20.0, tuple(20.0 + level for level in QUANTILES), 5, "history", 3)


def request(name: str, prompt_len: int = 20, max_new_tokens: int = 30, **fields: Any) -> Request:
    known: dict[str, Any] = {"origin": Origin(f"cmpl-{name}"), "forecast": FORECAST} | fields
    return Request(name, 0, "i", tuple(range(1, prompt_len + 1)), SamplingParams(max_new_tokens), **known)


class Replica:
    """A scheduler and its executor in step; steps take ``STEP_S``."""

    def __init__(self, preset: str, num_blocks: int = 24, max_num_seqs: int = 4) -> None:
        self.now = 10.0
        self.scheduler = build_scheduler(preset, SchedulerLimits(max_num_seqs, 2))
        limits = BatchLimits(max_num_seqs, 64)
        self.executor = LeaseExecutor(
            BlockManager(num_blocks, BLOCK), limits, "w", host=BlockManager(num_blocks, BLOCK)
        )
        self.ready = WorkerReady("w", num_blocks, BLOCK, num_blocks * BLOCK, True, 0, num_blocks)
        self.closed: dict[str, AccountClosed] = {}
        self.refused: list[str] = []
        self.plan: Plan | None = None

    def connect(self) -> None:
        self.tell(WorkerConnected(WorkerState(self.executor.take_over(), self.ready, (), self.executor.report())))

    def tell(self, event: Event) -> None:
        for instruction in self.scheduler.handle(event, self.now):
            match instruction:
                case SendPlan(plan):
                    self.plan = plan
                case AccountClosed(request_id):
                    assert request_id not in self.closed, "an account is told once"
                    self.closed[request_id] = instruction
                case RefuseRequest(request_id):
                    self.refused.append(request_id)
        self.scheduler.check_integrity()

    def step(self) -> None:
        if self.plan is not None:
            self.executor.apply_plan(self.plan)
            self.plan = None
        batch = self.executor.next_batch()
        for copy in self.executor.take_copies():
            self.executor.complete_copy(copy.copy_id)
        self.now += STEP_S
        if batch is not None:
            self.executor.commit(batch, (), duration_s=STEP_S)
        report = self.executor.report()
        self.executor.acknowledge(report.report_seq)
        self.tell(WorkerReported(report))

    def run(self) -> None:
        for _ in range(3000):
            if not self.scheduler.num_waiting + self.scheduler.num_admitted:
                return
            self.step()
        raise AssertionError("it never ends")

    def decisions(self, name: str) -> tuple[Decision, ...]:
        return unpack_decisions(self.closed[name].decisions)

    def kinds(self, name: str) -> list[str]:
        return [decision.kind for decision in self.decisions(name)]


PARTS = {
    "fastserve": ("level", "quantum_s", "held_tokens"),
    "past-future": ("predicted_peak_tokens", "limit_tokens", "capacity_tokens"),
    "conservative": ("predicted_peak_tokens", "limit_tokens"),
    "fcfs": ("held_tokens", "limit_tokens", "capacity_tokens"),
    "preble": ("hit_group", "group_slots"),
    "farsight": ("rank_s", "boost_s", "yardstick_s", "forecast_weight", "predicted_peak_tokens"),
    "farsight-mean": ("rank_s", "aged_rank_s", "expected_s", "forecast_weight"),
}
"""What an admission tells of its parts."""


def crowd(preset: str, **fields: Any) -> Replica:
    """Twelve requests in a pool that holds three or four of them."""
    replica = Replica(preset)
    replica.connect()
    for i in range(12):
        replica.tell(RequestsArrived((request(f"r{i}", **fields),)))
        replica.step()
    replica.run()
    return replica


@pytest.mark.parametrize("preset", CONTINUOUS)
def test_every_wait_is_told_with_its_length_and_every_account_begins_and_ends(preset: str) -> None:
    replica = crowd(preset, expected_cached_len=16)
    assert replica.closed.keys() == {f"r{i}" for i in range(12)}
    total_waits = 0.0
    for name in replica.closed:
        decisions = replica.decisions(name)
        assert (decisions[0].kind, decisions[-1].kind) == ("arrived", "finished")
        assert [each.at for each in decisions] == sorted(each.at for each in decisions)
        by_kind = defaultdict(list)
        for each in decisions:
            by_kind[each.kind].append(each)
        assert by_kind["forecast"][0].facts["mean_tokens"] == 20.0
        finished = by_kind["finished"][0].facts
        assert (finished["output_tokens"], finished["cached_tokens"]) == (30, 0), "whatever the router believed"
        told = [each for each in by_kind["admitted"] if "longest_tokens" not in each.facts]  # no part was asked
        assert all(name in each.facts for each in told for name in PARTS.get(preset, ()))
        for each in by_kind["admitted"] if "limit_tokens" in PARTS.get(preset, ()) else ():
            counted = {"held_tokens", "predicted_peak_tokens", "longest_tokens"} & each.facts.keys()
            assert float(each.facts[counted.pop()]) <= float(each.facts["capacity_tokens"])
        waited_s = sum(float(each.facts.get("waited_s", 0.0)) for each in decisions)
        assert by_kind["finished"][0].facts["all_waits_s"] == pytest.approx(waited_s)
        assert waited_s <= decisions[-1].at - decisions[0].at
        if waited_s > STEP_S:
            assert by_kind["waits"] or by_kind["paused"] or by_kind["offloaded"] or by_kind["preempted"]
        total_waits += waited_s
    assert total_waits > 1.0, "they cannot all have run at once"


def test_levels_and_moves_are_told_with_their_quanta_and_times() -> None:
    replica = crowd("fastserve")
    moves = [
        each for name in replica.closed for each in replica.decisions(name) if each.kind in ("demoted", "promoted")
    ]
    assert {each.kind for each in moves} >= {"demoted"}
    assert all(float(each.facts["level"]) > 1 for each in moves if each.kind == "demoted")
    moved = [
        each for name in replica.closed for each in replica.decisions(name) if each.kind in ("offloaded", "uploaded")
    ]
    assert {each.kind for each in moved} == {"offloaded", "uploaded"}
    assert all(float(each.facts["enst_s"]) >= 0 for each in moved if each.kind == "offloaded")


def test_a_refusal_of_admission_is_told_once_with_what_it_counted() -> None:
    replica = Replica("past-future", num_blocks=8, max_num_seqs=4)
    replica.connect()
    replica.tell(RequestsArrived((request("first", 20, 40), request("second", 20, 40))))
    for _ in range(10):
        replica.step()
    replica.run()
    waits = [each for each in replica.decisions("second") if each.kind == "waits"]
    assert [each.facts["reason"] for each in waits] == ["memory"]
    assert float(waits[0].facts["predicted_peak_tokens"]) > float(waits[0].facts["limit_tokens"])


def test_without_a_worker_they_wait_for_it_and_with_a_lost_one_they_are_lost() -> None:
    replica = Replica("fcfs")
    replica.tell(RequestsArrived((request("a"),)))
    replica.connect()
    replica.step()
    replica.tell(WorkerLost())
    assert replica.kinds("a") == ["arrived", "forecast", "waits", "admitted", "worker_lost"]
    assert replica.decisions("a")[2].facts["reason"] == "worker"


def test_placements_forecasts_that_come_late_refusals_and_aborts_are_told() -> None:
    replica = Replica("fcfs")
    replica.connect()
    late = request("late", forecast=None)
    replica.tell(RequestsArrived((late, request("long", 20, 10_000)), (b"why", b"not")))
    replica.tell(ForecastsArrived((ForecastMade("late", 0, FORECAST),)))
    assert replica.refused == ["long"]
    assert (replica.kinds("long"), replica.closed["long"].placement) == (["refused"], b"not")
    replica.tell(RequestsAborted((("late", 0),)))
    assert replica.kinds("late") == ["arrived", "admitted", "forecast", "aborted"]
    assert replica.closed["late"].placement == b"why"


def test_a_running_request_can_be_asked_for_by_the_id_of_its_answer() -> None:
    replica = Replica("fcfs")
    replica.connect()
    replica.tell(RequestsArrived((request("a"), request("b", origin=Origin("cmpl-a", 1)), request("c"))))
    assert [account.request.request_id for account in replica.scheduler.accounts("cmpl-a")] == ["a", "b"]
    replica.run()
    assert list(replica.scheduler.accounts("cmpl-a")) == []


def test_a_request_that_nobody_can_ask_for_is_not_noted() -> None:
    replica = Replica("fastserve")
    replica.connect()
    replica.tell(RequestsArrived(tuple(request(f"r{i}", origin=None) for i in range(8))))
    replica.run()
    assert not replica.closed


def test_an_account_keeps_its_beginning_and_its_end() -> None:
    accounts = Accounts(max_decisions=6)
    accounts.open(request("a"))
    for i in range(20):
        accounts.note("a", f"{i}", float(i), {})
    accounts.check_integrity({"a"})
    accounts.close("a")
    (account,) = accounts.pop_closed()
    assert [each.kind for each in unpack_decisions(b"".join(account.decisions))] == ["0", "1", "2", "17", "18", "19"]
    assert account.num_left_out == 14


def test_all_accounts_together_are_bounded_and_closing_makes_room() -> None:
    accounts = Accounts(max_in_all=5)
    for name in ("a", "b"):
        accounts.open(request(name))
        for i in range(4):
            accounts.note(name, f"{i}", float(i), {})
    accounts.check_integrity({"a", "b"})
    accounts.close("a")
    accounts.note("b", "more", 9.0, {})
    accounts.close("b")
    accounts.check_integrity(set())
    first, second = accounts.pop_closed()
    assert (len(first.decisions), first.num_left_out, len(second.decisions), second.num_left_out) == (4, 0, 2, 3)
    assert not accounts.has_closed


@pytest.mark.parametrize("num_tokens", [1, 30])
def test_the_steps_of_an_answer_are_counted_to_its_end(num_tokens: int) -> None:
    """An answer that ends in its first step has no report of its progress, only that of its end."""
    replica = Replica("fcfs")
    replica.connect()
    replica.tell(RequestsArrived((request("short", max_new_tokens=num_tokens),)))
    replica.run()
    assert replica.decisions("short")[-1].facts["ran_s"] == pytest.approx(num_tokens * STEP_S)


def view_of(h: Harness) -> SchedulerWatch:
    return SchedulerWatch("0", h.scheduler)


def forecast(mean: float) -> Forecast:
    return Forecast(mean, tuple(mean + level for level in QUANTILES), 5, "history", 3)


def end(number: int, output_len: int = 2) -> RequestEnded:
    finished = FinishedSequence(f"r-{number}", 0, SequenceStatus.FINISHED_STOPPED, output_len)
    return RequestEnded(finished, 1.0, 3.5, forecast(4.0), first_token_at=2.25)


@pytest.mark.parametrize("preset", CONTINUOUS)
def test_every_order_shows_its_requests(preset: str) -> None:
    h = Harness(max_num_seqs=2, preset=preset)
    h.arrive(small_request("a"), small_request("b"), small_request("c"))
    h.report(1, running("a", 2, 2), running("b", 0, 1))
    live = view_of(h).of(h.now, 10)
    assert (live.num_running, live.num_waiting, live.capacity_tokens) == (2, 1, 38)  # 2 tokens at the end of a block
    assert {row.request_id for row in live.requests} == {"a", "b", "c"}
    states = {row.request_id: row.state for row in live.requests}
    assert states["a"] in ("decode", "paused")
    assert states["c"] == "waiting" or preset != "fcfs"
    assert all(row.age_s > 0 and row.max_new_tokens == 4 for row in live.requests)


def test_without_a_worker_there_is_no_pool() -> None:
    h = Harness()
    h.arrive(small_request("a"))
    h.handle(WorkerLost())
    live = view_of(h).of(h.now, 10)
    assert (live.capacity_tokens, live.curve, live.requests, live.peak_tokens) == (0, (), (), 0)


def test_only_so_many_rows_are_shown() -> None:
    h = Harness(max_num_seqs=2)
    h.arrive(*(small_request(f"r{number}") for number in range(9)))
    assert len(view_of(h).of(h.now, 4).requests) == 4
    sums = view_of(h).of(h.now, 0)
    assert (sums.requests, sums.num_running, sums.num_waiting) == ((), 2, 7)


def test_the_predicted_memory_is_past_futures_curve() -> None:
    """a holds 6 tokens and will be 8 long, b holds 4 and will be 2 long: b ends after 2 steps, a after 6."""
    h = Harness()
    h.arrive(small_request("a", out=20), small_request("b", out=20))
    h.report(1, running("a", 2, 2), running("b", 0, 1))
    h.handle(ForecastsArrived((ForecastMade("a", 0, forecast(8.0)), ForecastMade("b", 0, forecast(2.0)))))
    live = view_of(h).of(h.now, 0)
    assert live.curve == (MemoryPoint(0, 10), MemoryPoint(2, 14), MemoryPoint(6, 12))
    assert live.peak_tokens == 14


def test_without_a_forecast_the_mean_of_those_that_ended_counts() -> None:
    h = Harness()
    h.arrive(small_request("a", out=20))
    view = view_of(h)
    assert view.of(h.now, 0).curve[-1].steps == 20
    view.ended(end(0, output_len=5))
    assert view.of(h.now, 0).curve[-1].steps == 5
    h.report(1, running("a", 9, 4))  # longer than the mean: as much again, not one token
    assert view.of(h.now, 0).curve[-1].steps == 5
    h.handle(ForecastsArrived((ForecastMade("a", 0, forecast(8.4)),)))  # longer than its mean: to the next quantile
    assert view.of(h.now, 0).curve[-1].steps == 1


def test_a_long_curve_is_thinned_and_keeps_its_peak() -> None:
    h = Harness(max_num_seqs=200, standby_slots=0)
    h.arrive(*(small_request(f"r{number}", prompt=1, out=number + 1) for number in range(39)))
    live = view_of(h).of(h.now, 0)
    assert len(live.curve) <= MAX_POINTS
    steps = [point.steps for point in live.curve]
    assert steps == sorted(set(steps))
    lengths = sorted((number + 1 for number in range(live.num_running)), reverse=True)
    assert live.peak_tokens == max((rank + 1) * (1 + ahead) for rank, ahead in enumerate(lengths))


def test_the_last_that_ended_are_kept() -> None:
    h = Harness()
    view = view_of(h)
    for number in range(3 * MAX_ENDED):
        view.ended(end(number))
        view.closed(AccountClosed(f"r-{number}", 0, Origin(f"cmpl-{number}", 1), b"", b"", 0, "acme", 7))
    ended = view.of(h.now, 1).ended
    assert len(ended) == MAX_ENDED
    for number in range(3 * MAX_ENDED):
        view.ended(end(number))
    assert len(view._just_ended) == MAX_ENDED, "nor are those kept for ever that cannot be explained"
    newest = ended[0]
    assert (newest.response_id, newest.choice, newest.reason) == (f"cmpl-{3 * MAX_ENDED - 1}", 1, "stop")
    assert (newest.output_len, newest.predicted_len, newest.took_s, newest.ago_s) == (2, 4.0, 2.5, h.now - 3.5)
    assert (newest.tenant, newest.prompt_len, newest.ttft_s) == ("acme", 7, 1.25)


def test_a_request_whose_client_left_is_among_those_that_ended() -> None:
    h = Harness(max_num_seqs=1)
    view = view_of(h)
    own = [dataclasses.replace(small_request(name), origin=Origin(f"cmpl-{name}", 0)) for name in "ab"]
    h.arrive(*own)
    h.handle(ForecastsArrived((ForecastMade("b", 0, forecast(8.0)),)))
    h.report(1, running("a", 2, 2))
    h.handle(RequestsAborted((("b", 0), ("a", 0))))
    for account in h.closed:
        view.closed(account)
    told = [(each.response_id, each.reason, each.output_len, each.predicted_len) for each in view.of(h.now, 1).ended]
    assert told == [("cmpl-a", "abort", 2, None), ("cmpl-b", "abort", 0, 4.0)]
    assert [each.took_s for each in view.of(h.now, 1).ended] == [3.0, 3.0]
    h.arrive(dataclasses.replace(own[0], attempt=1))
    h.arrive(dataclasses.replace(own[0], attempt=2))
    view.closed(h.closed[-1])
    assert len(h.closed) == 3 and len(view.of(h.now, 1).ended) == 2, "a later attempt goes on: no client has left"


def test_no_forecast_is_shown_above_the_limit_of_its_request() -> None:
    h = Harness()
    h.arrive(small_request("a", out=8))
    h.handle(ForecastsArrived((ForecastMade("a", 0, forecast(18.5)),)))
    (row,) = view_of(h).of(h.now, 10).requests
    assert (row.predicted_len, row.most_len) == (8.0, 8.0)
    assert h.scheduler._mirror.requests["a"].forecast == forecast(18.5), "policies know the whole law"


def test_the_progress_of_a_prompt_is_shown_and_counted_once() -> None:
    h = Harness()
    h.arrive(small_request("a", prompt=8), small_request("b", prompt=8))
    shown = []
    for seq, computed in enumerate((3, 6, 2, 8), 1):  # its KV is dropped in between
        h.report(seq, dataclasses.replace(running("a", 0, 2), computed_len=computed))
        live = view_of(h).of(h.now, 10)
        (row,) = (row for row in live.requests if row.request_id == "a")
        shown.append((row.prefilled_len, live.prompt_tokens))
    assert shown == [(3, 3), (6, 6), (6, 6), (8, 8)]
    assert h.scheduler.progress("a", h.now)["prefilled_tokens"] == 8
    assert h.scheduler.progress("b", h.now)["prefilled_tokens"] == 0
