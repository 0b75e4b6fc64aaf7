"""Scheduler and executor against each other, messages delayed at random: nothing leaks, nothing starves.

Schedulers die as well: what the worker holds goes on, and what it never got is submitted again as the ingress replicas
would do it.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections import Counter, deque

import pytest

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.messages.plans import Plan, StepReport, WorkerReady, WorkerState
from farsight.core.messages.requests import Key
from farsight.core.request import Origin, Request, SamplingParams
from farsight.kvcache import BatchLimits, BlockManager, LeaseExecutor, PipelinedExecutor, StepBatch
from farsight.kvcache.block_manager import hash_blocks
from farsight.policies.compose import build_scheduler
from farsight.policies.replica.events import (
    AccountClosed,
    Event,
    RequestEnded,
    RequestsAborted,
    RequestsArrived,
    SendPlan,
    WorkerConnected,
    WorkerReported,
)
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.policies.settings import PolicySettings
from tests.unit.policies.batch_jobs import seeds

BLOCK = 4


class Loop:
    """Both machines with a mailbox each way; plans may be lost, for a newer one always follows a change."""

    def __init__(self, num_blocks: int, max_num_seqs: int, standby: int, watermark: float, num_stages: int) -> None:
        self.limits = SchedulerLimits(max_num_seqs, standby)
        self.watermark = watermark
        parts = BlockManager(num_blocks, BLOCK), BatchLimits(max_num_seqs, 16), "w"
        self.executor = (
            LeaseExecutor(*parts) if num_stages == 1 else PipelinedExecutor(*parts, max_in_flight=num_stages)
        )
        self.begun: deque[StepBatch] = deque()
        self.executor.share_prefixes(self.block_hashes)
        self.max_len = num_blocks * BLOCK
        self.ready = WorkerReady("w", num_blocks, BLOCK, self.max_len, True, 9)
        self.requests: dict[str, Request] = {}  # the latest attempt of each
        self.payloads: dict[Key, Request] = {}
        self.ended: list[str] = []
        self.accounts: list[Key] = []
        self.ends: set[Key] = set()  # in the worker, whether reported or not
        self.start_scheduler()

    def block_hashes(self, name: str, num_blocks: int) -> list[int]:
        """Prompts are all alike as far as they go; every output is its own."""
        outputs = zlib.crc32(name.encode())
        prompt = next(request.prompt_ids for key, request in self.payloads.items() if key[0] == name)
        return hash_blocks([*prompt, *[outputs] * (num_blocks * BLOCK)], BLOCK)[:num_blocks]

    def start_scheduler(self) -> None:
        """The first one, or one in the place of another that died with all it knew and had not said."""
        self.scheduler = build_scheduler(
            "fcfs", self.limits, PolicySettings(SchedulerConfig(watermark=self.watermark, max_gap_ms=0.0))
        )
        self.plan: Plan | None = None
        self.reports: list[StepReport] = []
        self.take_over()

    def take_over(self) -> None:
        lease = self.executor.take_over()
        report = self.executor.report()
        held = tuple(self.payloads[each.request_id, each.attempt] for each in report.progress)
        self.handle(WorkerConnected(WorkerState(lease, self.ready, held, report)))
        running = [each.request_id for each in report.progress if each.num_blocks > 0]
        shipped = {slot.request_id: slot for slot in self.plan.slots} if self.plan is not None else {}
        assert {each.request_id for each in report.progress} <= set(shipped), "a plan forgets what the worker held"
        for name in running:
            assert (
                self.requests[name].attempt > shipped[name].attempt
                or not shipped[name].standby
                or (shipped[name].num_preemptions > 0)
            ), "a running sequence is stopped by a take-over"

    def submit(self, request: Request) -> None:
        request = dataclasses.replace(request, origin=Origin(request.request_id))
        self.requests[request.request_id] = request
        self.payloads[request.request_id, request.attempt] = request
        self.handle(RequestsArrived((request,)))

    def resume_unknown(self, alive: set[str]) -> None:
        """What the ingress replicas do about requests that no component has any more."""
        keys = [(name, self.requests[name].attempt) for name in sorted(alive)]
        for name, attempt in self.scheduler.unknown(keys):
            if (name, attempt) not in self.ends:  # else its last tokens have reached the client
                self.submit(dataclasses.replace(self.requests[name], attempt=attempt + 1))

    def handle(self, event: Event) -> None:
        for instruction in self.scheduler.handle(event, 0.0):
            if isinstance(instruction, SendPlan):
                self.plan = instruction.plan
            elif isinstance(instruction, RequestEnded):
                self.ended.append(instruction.finished.request_id)
            elif isinstance(instruction, AccountClosed):
                self.accounts.append((instruction.request_id, instruction.attempt))
        self.scheduler.check_integrity()

    def deliver_plan(self) -> None:
        if self.plan is not None:
            self.executor.apply_plan(self.plan)
            self.executor.check_integrity()

    def step(self, stop: float, rng: random.Random) -> None:
        """Commits one step; as many as there are stages have begun by then, if there is work for them."""
        while len(self.begun) < self.executor.max_in_flight and (batch := self.executor.next_batch()):
            self.check_writes(batch)
            self.begun.append(batch)
        self.executor.check_integrity()
        if self.begun:
            batch = self.begun.popleft()
            counted = [item for item in batch.items if item.samples and self.executor.counts(batch, item.request_id)]
            stopped = [item.request_id for item in counted if rng.random() < stop]
            self.ends |= {(end.request_id, end.attempt) for end in self.executor.commit(batch, stopped)}
            self.executor.check_integrity()

    def check_writes(self, batch: StepBatch) -> None:
        """No block is written that another sequence has; those of steps under way that still count among them."""
        items = list(batch.items)
        for other in self.begun:
            items += [item for item in other.items if self.executor.counts(other, item.request_id)]
        covered = Counter(block for item in items for block in item.blocks)
        assert len({item.request_id for item in items}) == len(items), "a sequence is in two steps at once"
        for item in items:
            written = item.blocks[item.start // BLOCK :]
            assert all(covered[block] == 1 for block in written), "a shared block is written"
            assert len(item.blocks) * BLOCK >= item.start + item.num_tokens

    @property
    def is_drained(self) -> bool:
        """Whether neither machine has a request; nothing but empty reports follows."""
        return not (self.executor.num_held or self.scheduler.num_waiting or self.scheduler.num_admitted)

    def report(self) -> None:
        self.reports.append(self.executor.report())

    def deliver_report(self) -> None:
        if self.reports:
            report = self.reports.pop(0)
            self.executor.acknowledge(report.report_seq)
            self.handle(WorkerReported(report))


ACTIONS = ["submit"] * 2 + ["step"] * 6 + ["plan", "report", "ack"] * 3 + ["abort"]
DISASTERS = ["stall", "die", "reconnect", "resume", "resume"]


@pytest.mark.parametrize("seed", seeds(100, nightly=500))
def test_random_lives_drain_and_leave_the_pool_whole(seed: int) -> None:
    """Half of the schedulers die; clients that are slow block nobody for good."""
    rng = random.Random(seed)
    num_blocks, mortal = rng.randint(2, 24), seed % 2 == 1
    watermark, num_stages = rng.choice([0.5, 0.9, 1.0]), rng.choice([1, 1, 2, 3])
    loop = Loop(num_blocks, rng.randint(1, 6), rng.randint(0, 4), watermark, num_stages)
    aborted: set[str] = set()
    actions = ACTIONS + DISASTERS * mortal
    for i in range(130):
        match rng.choice(actions):
            case "submit":
                prompt = rng.randint(1, max(1, loop.max_len // 2))
                out = rng.randint(1, max(1, loop.max_len - prompt))
                resumed = (2,) * rng.choice([0, 0, rng.randint(0, out - 1)])
                loop.submit(Request(f"r{i}", 0, "i", (1,) * prompt, SamplingParams(out), resumed))
            case "step":
                loop.step(0.1, rng)
            case "plan":
                loop.deliver_plan()
            case "report":
                loop.report()
            case "ack":
                loop.deliver_report()
            case "abort" if loop.requests:
                victim = rng.choice(sorted(loop.requests))
                loop.handle(RequestsAborted(((victim, loop.requests[victim].attempt),)))
                aborted.add(victim)
            case "stall":
                names = sorted(loop.requests)
                loop.executor.stall(frozenset(rng.sample(names, k=rng.randint(0, len(names)))))
            case "die":
                loop.start_scheduler()
            case "reconnect":
                loop.reports.clear()
                loop.take_over()
            case "resume":
                loop.resume_unknown(loop.requests.keys() - aborted)
    loop.executor.stall(frozenset())
    for i in range(40 * len(loop.requests) + 100):  # messages flow again: everything must end
        if i >= 30 and loop.is_drained:
            break
        if mortal:
            loop.resume_unknown(loop.requests.keys() - aborted)
        loop.deliver_plan()
        loop.step(0.1, rng)
        loop.report()
        while loop.reports:
            loop.deliver_report()
    latest = {(name, request.attempt) for name, request in loop.requests.items() if name not in aborted}
    assert latest <= loop.ends
    if not mortal:
        assert len(loop.ended) == len(set(loop.ended)), "an end was told twice"
        assert loop.requests.keys() - aborted <= set(loop.ended) <= loop.requests.keys()
        assert sorted(loop.accounts) == sorted((name, 0) for name in loop.requests), "one account each, told once"
    assert loop.executor.num_held == 0
    assert loop.executor.blocks.num_free == num_blocks
    assert loop.scheduler.num_waiting + loop.scheduler.num_admitted == 0
