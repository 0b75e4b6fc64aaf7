"""The replica scheduler and the host: who is sent there, who is called back, and when it may count on the blocks."""

from __future__ import annotations

import dataclasses

from core.messages.plans import Plan, SlotProgress, StepReport, WorkerReady, WorkerState
from core.request import Request, Residency, SamplingParams, SequenceStatus
from policies.compose import build_scheduler
from policies.replica.events import Event, RequestsArrived, SendPlan, WorkerConnected, WorkerReported
from policies.replica.scheduler import SchedulerLimits
from policies.settings import PolicySettings

DEVICE, HOST = Residency.DEVICE, Residency.HOST


class Harness:
    """A scheduler under which ``a`` and ``b`` run with 5 of 10 blocks each; keeps the latest plan."""

    now = 0.0

    def __init__(self, num_host_blocks: int = 10, limits: SchedulerLimits | None = None) -> None:
        limits = limits or SchedulerLimits(8, 2)
        self.scheduler = build_scheduler("fcfs", limits, PolicySettings(watermark=1.0), kv="swap-newest")
        self.plan: Plan | None = None
        self.seq = 0
        ready = WorkerReady("w", 10, 4, 40, True, 100, num_host_blocks)
        self.handle(WorkerConnected(WorkerState(1, ready, (), StepReport("w", 1, 0, 0, 10, 0, (), (), ()))))
        self.handle(RequestsArrived(tuple(Request(name, 0, "i", (1,) * 20, SamplingParams(20)) for name in "ab")))
        self.report(on_device("a"), on_device("b"))

    def handle(self, event: Event) -> None:
        for instruction in self.scheduler.handle(event, self.now):
            self.take(instruction)
        self.scheduler.check_integrity()

    def take(self, instruction: object) -> None:
        if isinstance(instruction, SendPlan):
            self.plan = instruction.plan

    def report(self, *progress: SlotProgress, short: int = 0) -> None:
        assert self.plan is not None
        self.seq += 1
        self.handle(WorkerReported(StepReport("w", 1, self.seq, self.plan.plan_seq, 0, short, progress, (), ())))

    def slot(self, name: str) -> tuple[bool, int, Residency, int]:
        """Whether it is admitted, how often its KV was dropped, where it is to be, how often it was moved."""
        assert self.plan is not None
        (slot,) = [slot for slot in self.plan.slots if slot.request_id == name]
        return not slot.standby, slot.num_preemptions, slot.residency, slot.num_moves


def on_device(name: str, num_blocks: int = 5) -> SlotProgress:
    known_len = 4 * num_blocks
    return SlotProgress(name, 0, SequenceStatus.RUNNING, 0, known_len, known_len - 20, num_blocks, False)


def leaving(name: str) -> SlotProgress:
    return dataclasses.replace(on_device(name), residency=HOST, num_moves=1, num_host_blocks=5)


def on_host(name: str) -> SlotProgress:
    return dataclasses.replace(leaving(name), status=SequenceStatus.OFFLOADED, num_blocks=0)


def test_a_victim_is_moved_and_called_back_when_there_is_room() -> None:
    h = Harness()
    h.report(on_device("a"), on_device("b"), short=1)
    assert h.slot("b") == (False, 0, HOST, 1)
    h.report(on_device("a"), leaving("b"), short=1)
    assert (h.slot("a")[0], h.slot("b")) == (True, (False, 0, HOST, 1)), "the blocks are on their way: no more victims"
    h.report(on_device("a", 6), on_host("b"))
    assert h.slot("b") == (False, 0, HOST, 1), "there is no room yet"
    h.report(on_device("a", 5), on_host("b"))
    assert h.slot("b") == (True, 0, DEVICE, 2)


def test_a_victim_that_the_host_has_no_room_for_is_computed_again() -> None:
    h = Harness()
    h.report(on_device("a", 6), on_device("b"), short=1)
    h.report(on_device("a", 6), dataclasses.replace(on_device("b"), num_moves=1))
    assert h.slot("b") == (False, 1, DEVICE, 1)


def test_without_a_host_pool_victims_are_computed_again() -> None:
    h = Harness(num_host_blocks=0)
    h.report(on_device("a", 6), on_device("b"), short=1)
    assert h.slot("b") == (False, 1, DEVICE, 0)
