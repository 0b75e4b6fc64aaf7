"""The cost for a replica's scheduler of its decision traces, by which requests are explained."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.decisions.row import Row
from farsight.core.codec import decode, encode
from farsight.core.messages.plans import Plan, StepReport, WorkerReady, WorkerState
from farsight.core.messages.requests import Submit
from farsight.core.request import Origin, Request, SamplingParams
from farsight.kvcache import BatchLimits, BlockManager, LeaseExecutor
from farsight.policies.compose import build_scheduler
from farsight.policies.replica.events import (
    AccountClosed,
    Event,
    RequestsArrived,
    SendPlan,
    WorkerConnected,
    WorkerReported,
    request_trace,
)
from farsight.policies.replica.scheduler import ReplicaScheduler, SchedulerLimits

PRESETS = ("fcfs", "fastserve", "past-future", "preble", "farsight")
NUM_REQUESTS = 256
NUM_SEQS = 64
STEPS_A_REPORT = 4
"""Reports are 20 ms apart or more: with steps of 5 ms every fourth."""

STEP_S = 0.005
ROUNDS = 7


class _Drive:
    """A Scheduler's work and an executor without a device: requests arrive steadily, steps take their time."""

    def __init__(self, preset: str, *, explained: bool) -> None:
        self.scheduler: ReplicaScheduler = build_scheduler(preset, SchedulerLimits(NUM_SEQS, 16))
        self.executor = LeaseExecutor(
            BlockManager(480, 32), BatchLimits(NUM_SEQS, 2048), "w", host=BlockManager(480, 32)
        )
        self.explained = explained
        self.spent_s: list[float] = []
        self.now = 0.0
        ready = WorkerReady("w", 480, 32, 4096, True, 0, 480)
        self.tell(WorkerState(self.executor.take_over(), ready, (), self.executor.report()))

    def tell(self, message: Submit | StepReport | WorkerState) -> None:
        """What the Scheduler does with a message, from its bytes to those of its answers."""
        data, kind = encode(message), type(message)
        begin = time.perf_counter()
        plan: Plan | None = None
        for instruction in self.scheduler.handle(_event(decode(data, kind)), self.now):
            match instruction:
                case SendPlan(plan):
                    encode(plan)
                case AccountClosed():
                    encode(request_trace(instruction, "scheduler-0", 0.0, ended=True))
        self.spent_s.append(time.perf_counter() - begin)
        if plan is not None:
            self.executor.apply_plan(plan)

    def run(self) -> list[float]:
        """Seconds in the Scheduler for each message, until all have ended."""
        waiting = self._requests()
        for step in range(1_000_000):
            if step % 2 == 0 and (request := next(waiting, None)) is not None:
                self.tell(Submit((request,)))
            batch = self.executor.next_batch()
            for copy in self.executor.take_copies():
                self.executor.complete_copy(copy.copy_id)
            self.now += STEP_S
            ended = () if batch is None else self.executor.commit(batch, (), duration_s=STEP_S)
            if ended or batch is None or step % STEPS_A_REPORT == 0:
                report = self.executor.report()
                self.executor.acknowledge(report.report_seq)
                self.tell(report)
            if batch is None and not self.scheduler.num_waiting + self.scheduler.num_admitted:
                break
        return self.spent_s

    def _requests(self) -> Iterator[Request]:
        for i in range(NUM_REQUESTS):
            length = 32 + 37 * i % 300
            origin = Origin(f"cmpl-{i:032x}") if self.explained else None
            yield Request(f"r{i}", 0, "i", (1,) * (16 + i % 96), SamplingParams(length), origin=origin)


def _event(message: Submit | StepReport | WorkerState) -> Event:
    match message:
        case Submit(requests, placements):
            return RequestsArrived(requests, placements)
        case StepReport():
            return WorkerReported(message)
    return WorkerConnected(message)


def rows() -> list[Row]:
    found = []
    for preset in PRESETS:
        with_notes, without = [], []
        for _ in range(ROUNDS):
            without.append(_Drive(preset, explained=False).run())
            with_notes.append(_Drive(preset, explained=True).run())
        more = 100 * (_undisturbed_s(with_notes) / _undisturbed_s(without) - 1)
        found.append(Row(f"{preset}: decision traces, share of a Scheduler's time", more, 2.0, "%"))
    return found


def _undisturbed_s(rounds: list[list[float]]) -> float:
    """All rounds are the same messages: each as quick as it ever was, together."""
    return sum(map(min, zip(*rounds, strict=True)))
