"""What is noted of decisions: of every preset, within bounds, and only of requests that a client can ask for."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from core.decisions import Decision, unpack_decisions
from core.forecast import QUANTILES, Forecast
from core.messages.forecasts import ForecastMade
from core.messages.plans import Plan, WorkerReady, WorkerState
from core.request import Origin, Request, SamplingParams
from kvcache import BatchLimits, BlockManager, LeaseExecutor
from policies.compose import build_scheduler
from policies.presets import PRESETS
from policies.replica.decision_trace import Accounts
from policies.replica.events import (
    AccountClosed,
    Event,
    ForecastsArrived,
    RefuseRequest,
    RequestsAborted,
    RequestsArrived,
    SendPlan,
    WorkerConnected,
    WorkerLost,
    WorkerReported,
)
from policies.replica.scheduler import SchedulerLimits

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


def crowd(preset: str) -> Replica:
    """Twelve requests in a pool that holds three or four of them."""
    replica = Replica(preset)
    replica.connect()
    for i in range(12):
        replica.tell(RequestsArrived((request(f"r{i}"),)))
        replica.step()
    replica.run()
    return replica


@pytest.mark.parametrize("preset", CONTINUOUS)
def test_every_wait_is_told_with_its_length_and_every_account_begins_and_ends(preset: str) -> None:
    replica = crowd(preset)
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
        assert by_kind["finished"][0].facts["output_tokens"] == 30
        waited_s = sum(float(each.facts.get("waited_s", 0.0)) for each in decisions)
        assert by_kind["finished"][0].facts["all_waits_s"] == pytest.approx(waited_s)
        assert waited_s <= decisions[-1].at - decisions[0].at
        if waited_s > STEP_S:
            assert by_kind["waits"] or by_kind["paused"] or by_kind["offloaded"] or by_kind["preempted"]
        total_waits += waited_s
    assert total_waits > 1.0, "they cannot all have run at once"


@pytest.mark.parametrize("preset", CONTINUOUS)
def test_a_replica_without_a_prefix_cache_tells_of_no_cached_tokens_whatever_the_router_believed(preset: str) -> None:
    replica = Replica(preset)
    replica.connect()
    replica.tell(RequestsArrived((request("r", expected_cached_len=16),)))
    replica.run()
    assert replica.decisions("r")[-1].facts["cached_tokens"] == 0


PARTS = {
    "fastserve": ("level", "quantum_s", "held_tokens"),
    "past-future": ("predicted_peak_tokens", "limit_tokens", "capacity_tokens"),
    "conservative": ("predicted_peak_tokens", "limit_tokens"),
    "fcfs": ("held_tokens", "limit_tokens", "capacity_tokens"),
    "preble": ("hit_group", "group_slots"),
    "farsight": ("rank_s", "boost_s", "yardstick_s", "forecast_weight", "predicted_peak_tokens"),
    "farsight-mean": ("rank_s", "aged_rank_s", "expected_s", "forecast_weight"),
}


@pytest.mark.parametrize("preset", PARTS)
def test_an_admission_tells_the_numbers_of_its_parts(preset: str) -> None:
    replica = crowd(preset)
    admitted = [each for name in replica.closed for each in replica.decisions(name) if each.kind == "admitted"]
    assert all(name in each.facts for each in admitted for name in PARTS[preset])
    if "limit_tokens" in PARTS[preset]:
        counted = "held_tokens" if preset == "fcfs" else "predicted_peak_tokens"
        assert all(float(each.facts[counted]) <= float(each.facts["capacity_tokens"]) for each in admitted)


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
