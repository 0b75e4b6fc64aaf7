"""Scheduler and executor against each other, messages delayed at random: nothing leaks, nothing starves."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from core.messages import Plan, StepReport, WorkerReady
from core.request import Request, SamplingParams
from kvcache import BatchLimits, BlockManager, LeaseExecutor
from policies.presets import build_scheduler
from policies.replica_scheduler import (
    Event,
    RequestEnded,
    RequestsAborted,
    RequestsArrived,
    SchedulerLimits,
    SendPlan,
    WorkerConnected,
    WorkerReported,
)

BLOCK = 4


class Loop:
    """Both machines with a mailbox each way; plans may be lost, for a newer one always follows a change."""

    def __init__(self, num_blocks: int, max_num_seqs: int, standby: int, watermark: float) -> None:
        limits = SchedulerLimits(max_num_seqs, standby)
        self.scheduler = build_scheduler("fcfs", watermark=watermark, limits=limits)
        self.executor = LeaseExecutor(BlockManager(num_blocks, BLOCK), BatchLimits(max_num_seqs, 16), "w")
        self.max_len = num_blocks * BLOCK
        self.plan: Plan | None = None
        self.reports: list[StepReport] = []
        self.ended: list[str] = []
        self.handle(WorkerConnected(WorkerReady("w", num_blocks, BLOCK, self.max_len, True, 9)))

    def handle(self, event: Event) -> None:
        for instruction in self.scheduler.handle(event, 0.0):
            if isinstance(instruction, SendPlan):
                self.plan = instruction.plan
            elif isinstance(instruction, RequestEnded):
                self.ended.append(instruction.finished.request_id)
        self.scheduler.check_integrity()

    def deliver_plan(self) -> None:
        if self.plan is not None:
            self.executor.apply_plan(self.plan)
            self.executor.check_integrity()

    def step(self, stop: float, rng: random.Random) -> bool:
        batch = self.executor.next_batch()
        self.executor.check_integrity()
        if batch is None:
            return False
        covered = [block for item in batch.items for block in item.blocks]
        assert len(covered) == len(set(covered)), "two sequences of a step share a block"
        for item in batch.items:
            assert len(item.blocks) * BLOCK >= item.start + item.num_tokens
        stopped = [item.request_id for item in batch.items if item.samples and rng.random() < stop]
        self.executor.commit(batch, stopped)
        self.executor.check_integrity()
        return True

    def report(self) -> None:
        self.reports.append(self.executor.report())

    def deliver_report(self) -> None:
        if self.reports:
            report = self.reports.pop(0)
            self.executor.acknowledge(report.report_seq)
            self.handle(WorkerReported(report))


@settings(max_examples=400)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(2, 24),
    max_num_seqs=st.integers(1, 6),
    standby=st.integers(0, 4),
    watermark=st.sampled_from([0.5, 0.9, 1.0]),
)
def test_random_lives_drain_and_leave_the_pool_whole(
    seed: int, num_blocks: int, max_num_seqs: int, standby: int, watermark: float
) -> None:
    rng = random.Random(seed)
    loop = Loop(num_blocks, max_num_seqs, standby, watermark)
    submitted: set[str] = set()
    aborted: set[str] = set()
    for i in range(120):
        match rng.choice(["submit", "step", "step", "step", "plan", "plan", "report", "ack", "ack", "abort"]):
            case "submit" if i < 80:
                prompt = rng.randint(1, max(1, loop.max_len // 2))
                out = rng.randint(1, max(1, loop.max_len - prompt))
                loop.handle(RequestsArrived((Request(f"r{i}", 0, "i", (1,) * prompt, SamplingParams(out)),)))
                submitted.add(f"r{i}")
            case "step":
                loop.step(0.1, rng)
            case "plan":
                loop.deliver_plan()
            case "report":
                loop.report()
            case "ack":
                loop.deliver_report()
            case "abort" if submitted:
                victim = rng.choice(sorted(submitted))
                loop.handle(RequestsAborted(((victim, 0),)))
                aborted.add(victim)
    for _ in range(40 * len(submitted) + 100):  # messages flow again: everything must end
        loop.deliver_plan()
        loop.step(0.1, rng)
        loop.report()
        while loop.reports:
            loop.deliver_report()
    assert len(loop.ended) == len(set(loop.ended)), "an end was told twice"
    assert submitted - aborted <= set(loop.ended) <= submitted
    assert loop.executor.num_held == 0
    assert loop.executor.blocks.num_free == num_blocks
    assert loop.scheduler.num_waiting + loop.scheduler.num_admitted == 0
