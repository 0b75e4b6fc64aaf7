"""The replica scheduler alone: events in, instructions out."""

from __future__ import annotations

from core.messages import FinishedSequence, Plan, SlotProgress, StepReport, WorkerReady
from core.request import Request, SamplingParams, SequenceStatus
from policies.presets import build_scheduler
from policies.replica_scheduler import (
    Event,
    RefuseRequest,
    ReplicaScheduler,
    RequestEnded,
    RequestsAborted,
    RequestsArrived,
    SchedulerLimits,
    SendPlan,
    WorkerConnected,
    WorkerReported,
)

READY = WorkerReady("w", num_blocks=10, block_size=4, max_model_len=40, pool_limited=True, vocab_size=100)


def request(name: str, prompt: int = 4, out: int = 4, attempt: int = 0) -> Request:
    return Request(name, attempt, "i", (1,) * prompt, SamplingParams(out))


class Harness:
    """A scheduler whose integrity is checked after every event; keeps the latest plan."""

    def __init__(self, max_num_seqs: int = 8, standby_slots: int = 2) -> None:
        limits = SchedulerLimits(max_num_seqs, standby_slots)
        self.scheduler: ReplicaScheduler = build_scheduler("fcfs", watermark=1.0, limits=limits)
        self.plans: list[Plan] = []
        self.ended: list[RequestEnded] = []
        self.refused: list[RefuseRequest] = []
        self.now = 0.0
        self.handle(WorkerConnected(READY))

    def handle(self, event: Event) -> None:
        self.now += 1
        for instruction in self.scheduler.handle(event, self.now):
            match instruction:
                case SendPlan(plan):
                    self.plans.append(plan)
                case RequestEnded():
                    self.ended.append(instruction)
                case RefuseRequest():
                    self.refused.append(instruction)
        self.scheduler.check_integrity()

    def arrive(self, *requests: Request) -> None:
        self.handle(RequestsArrived(requests))

    def report(
        self, seq: int, *progress: SlotProgress, ended: tuple[str, ...] = (), short: int = 0, plan: int = 0
    ) -> None:
        done = tuple(FinishedSequence(name, 0, SequenceStatus.FINISHED_STOPPED, 2) for name in ended)
        plan_seq = plan or self.plans[-1].plan_seq
        self.handle(WorkerReported(StepReport("w", seq, plan_seq, 0, short, progress, done)))

    @property
    def admitted(self) -> list[str]:
        return [slot.request_id for slot in self.plans[-1].slots if not slot.standby]

    @property
    def standby(self) -> list[str]:
        return [slot.request_id for slot in self.plans[-1].slots if slot.standby]


def running(name: str, output: int, blocks: int, preemptions: int = 0) -> SlotProgress:
    return SlotProgress(name, 0, SequenceStatus.RUNNING, preemptions, 4 + output, output, blocks)


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
    h.report(1, running("a", 1, 2), plan=1 + 1)  # the plan before: has a, not b
    h.arrive(request("c"))
    assert [slot.request is not None for slot in h.plans[-1].slots] == [False, True, True]


def test_an_end_is_told_once_and_lets_the_next_in() -> None:
    h = Harness(max_num_seqs=1)
    h.arrive(request("a"), request("b"))
    h.report(1, ended=("a",))
    h.report(2, ended=("a",))
    assert [(end.finished.request_id, end.arrived_at) for end in h.ended] == [("a", 2.0)]
    assert h.admitted == ["b"]
    assert h.plans[-1].as_of_report_seq == 1


def test_reports_out_of_order_or_of_another_life_are_ignored() -> None:
    h = Harness(max_num_seqs=1)
    h.arrive(request("a"), request("b"))
    h.report(5)
    h.report(4, ended=("a",))
    assert h.ended == []
    foreign = StepReport("other", 9, 1, 0, 0, (), (FinishedSequence("a", 0, SequenceStatus.FINISHED_STOPPED, 1),))
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
    h.handle(WorkerConnected(WorkerReady("w2", 10, 4, 40, True, 100)))
    plan = h.plans[-1]
    assert (plan.worker_incarnation, plan.plan_seq) == ("w2", 1)
    assert (h.admitted, h.standby) == (["a", "b"], ["c"])
    assert all(slot.request is not None for slot in plan.slots)
