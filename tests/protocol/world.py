"""The pure machines on a virtual clock and a network that delays, drops, duplicates and reorders.

Everything that crosses between pieces goes through the codec and a ``Link``. Submits and aborts are delivered in
order and once, as actor calls are; plans, reports, acknowledgements and tokens are not. What a real shell repeats
until it is confirmed (the newest plan, the poll) is repeated here by timers.
"""

from __future__ import annotations

import heapq
import itertools
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from core.codec import decode, encode
from core.messages import Plan, StepReport, TokenBatches, TokenDelta, WorkerReady
from core.request import Request, SamplingParams, SequenceStatus
from engine.outbox import TokenOutbox
from kvcache import BatchLimits, BlockManager, LeaseExecutor, StepBatch
from policies.global_scheduler import AbortOnReplica, GlobalScheduler, PlaceRequests, ReplicaConnected, RequestLeft
from policies.presets import build_router, build_scheduler
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
from services.inbox import TokenInbox

BLOCK = 4
STEP_S, REPORT_S, POLL_S, RESEND_S = 0.005, 0.020, 0.010, 0.030


@dataclass(frozen=True)
class Faults:
    """How bad the network is; delays in seconds."""

    drop: float
    duplicate: float
    max_delay_s: float


class Clock:
    """Virtual time: runs what is due, in order of time and then of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay_s, next(self._order), action))

    def every(self, period_s: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self.after(period_s, again)

        self.after(period_s, again)

    def step(self) -> None:
        self.now, _, action = heapq.heappop(self._due)
        action()


class Link:
    """One way from piece to piece."""

    def __init__(self, clock: Clock, rng: random.Random, faults: Faults) -> None:
        self._clock, self._rng, self._faults = clock, rng, faults

    def send(self, data: bytes, deliver: Callable[[bytes], None]) -> None:
        copies = 0 if self._rng.random() < self._faults.drop else 1
        copies += self._rng.random() < self._faults.duplicate
        for _ in range(copies):
            self._clock.after(self._rng.uniform(0, self._faults.max_delay_s), lambda: deliver(data))


def token_at(request_id: str, position: int) -> int:
    """What this world's model says there: tokens that tell where they belong."""
    return zlib.crc32(f"{request_id}@{position}".encode()) % 1000


class Replica:
    """A scheduler and a worker with a network between them."""

    def __init__(self, world: World, name: str, num_blocks: int, limits: SchedulerLimits, watermark: float) -> None:
        self.world, self.name = world, name
        self.scheduler = build_scheduler("fcfs", watermark=watermark, limits=limits)
        self.executor = LeaseExecutor(BlockManager(num_blocks, BLOCK), BatchLimits(limits.max_num_seqs, 24), name)
        self.outbox = TokenOutbox(name)
        self.inbox = TokenInbox()
        self._said: dict[str, int] = {}  # output tokens so far
        self._plan: Plan | None = None
        self._pending: Plan | None = None
        self._applied = 0
        self.handle(WorkerConnected(WorkerReady(name, num_blocks, BLOCK, num_blocks * BLOCK, True, 1000)))
        clock = world.clock
        clock.every(REPORT_S, self._report)
        clock.every(RESEND_S, self._resend)
        clock.every(POLL_S, self._poll)
        clock.after(STEP_S, self._step)

    def handle(self, event: Event) -> None:
        for instruction in self.scheduler.handle(event, self.world.clock.now):
            match instruction:
                case SendPlan(plan):
                    self._plan = plan
                    self._send_plan(plan)
                case RequestEnded(finished):
                    self.world.route(RequestLeft(finished.request_id, finished.attempt, finished.output_len))
        self.scheduler.check_integrity()

    def _send_plan(self, plan: Plan) -> None:
        self.world.link.send(encode(plan), self._take_plan)

    def _resend(self) -> None:
        if self._plan is not None and self._plan.plan_seq > self._applied:
            self._send_plan(self._plan)

    def _take_plan(self, data: bytes) -> None:
        plan = decode(data, Plan)
        if self._pending is None or plan.plan_seq > self._pending.plan_seq:
            self._pending = plan

    def _step(self) -> None:
        if self._pending is not None:
            plan, self._pending = self._pending, None
            self.executor.apply_plan(plan)
        batch = self.executor.next_batch()
        self.executor.check_integrity()
        self.world.clock.after(STEP_S, self._step if batch is None else lambda: self._finish(batch))

    def _finish(self, batch: StepBatch) -> None:
        stopped = [i.request_id for i in batch.items if i.samples and self.world.rng.random() < 0.05]
        ended = {end.request_id: end.status for end in self.executor.commit(batch, stopped)}
        self.executor.check_integrity()
        for item in batch.items:
            if item.samples:
                self._say(item.request_id, ended.get(item.request_id))
        self._step()

    def _say(self, request_id: str, status: SequenceStatus | None) -> None:
        position = self._said.get(request_id, 0)
        self._said[request_id] = position + 1
        reason = None if status is None else status.finish_reason
        token = token_at(request_id, position)
        self.outbox.put(TokenDelta(request_id, 0, position, (token,), "", reason, None))

    def _report(self) -> None:
        self.world.link.send(encode(self.executor.report()), self._take_report)

    def _take_report(self, data: bytes) -> None:
        report = decode(data, StepReport)
        self._applied = max(self._applied, report.plan_seq)
        self.handle(WorkerReported(report))
        seq = report.report_seq
        self.world.link.send(b"", lambda _: self.executor.acknowledge(seq))

    def _poll(self) -> None:
        ack_seq = self.inbox.ack_seq
        self.world.link.send(b"", lambda _: self._answer_poll(ack_seq))

    def _answer_poll(self, ack_seq: int) -> None:
        self.outbox.acknowledge(ack_seq)
        self.world.link.send(encode(self.outbox.take()), self._take_tokens)

    def _take_tokens(self, data: bytes) -> None:
        for delta in self.inbox.receive(decode(data, TokenBatches)):
            self.world.show(delta)


@dataclass
class Client:
    """One request as its client sees it."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    gone: bool = False


class World:
    """A router, some replicas, and clients that come and go."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.clock = Clock()
        faults = Faults(rng.choice([0, 0.1, 0.4]), rng.choice([0, 0.2]), rng.choice([0.001, 0.02, 0.1]))
        self.link = Link(self.clock, rng, faults)
        self.router: GlobalScheduler = build_router("fcfs", rng.choice(["round-robin", "least-work"]))
        self.clients: dict[str, Client] = {}
        self.story: list[str] = [f"faults {faults}"]
        limits = SchedulerLimits(rng.randint(1, 6), rng.randint(0, 4))
        num_blocks, watermark = rng.randint(4, 24), rng.choice([0.6, 1.0])
        self.max_len = num_blocks * BLOCK
        names = [f"replica-{i}" for i in range(rng.randint(1, 3))]
        self.replicas = {name: Replica(self, name, num_blocks, limits, watermark) for name in names}
        for name in names:
            self.route(ReplicaConnected(name))

    def route(self, event: ReplicaConnected | RequestsArrived | RequestsAborted | RequestLeft) -> None:
        for instruction in self.router.handle(event, self.clock.now):
            match instruction:
                case PlaceRequests(name, requests):
                    self.replicas[name].handle(RequestsArrived(requests))
                case AbortOnReplica(name, keys):
                    self.replicas[name].handle(RequestsAborted(keys))
        self.router.check_integrity()

    def submit(self, request_id: str) -> None:
        prompt = self.rng.randint(1, self.max_len // 2)
        output = self.rng.randint(1, min(30, self.max_len - prompt))
        request = Request(request_id, 0, "ingress", (1,) * prompt, SamplingParams(output))
        self.clients[request_id] = Client(request)
        self.tell(f"{request_id} submitted: {prompt} + {output} tokens")
        self.route(RequestsArrived((request,)))

    def leave(self) -> None:
        alive = [rid for rid, client in self.clients.items() if not client.gone and client.reason is None]
        if alive:
            request_id = self.rng.choice(alive)
            self.clients[request_id].gone = True
            self.tell(f"{request_id} left by its client")
            self.route(RequestsAborted(((request_id, 0),)))

    def show(self, delta: TokenDelta) -> None:
        client = self.clients[delta.request_id]
        if client.gone:
            return
        assert client.reason is None, f"{delta.request_id}: a reply after its end"
        assert delta.start == len(client.tokens), f"{delta.request_id}: {delta.start} after {len(client.tokens)} tokens"
        client.tokens += delta.token_ids
        client.reason = delta.finish_reason
        if delta.finish_reason:
            self.tell(f"{delta.request_id} ended: {delta.finish_reason} after {len(client.tokens)} tokens")

    def tell(self, line: str) -> None:
        self.story.append(f"{self.clock.now:8.3f} {line}")

    @property
    def drained(self) -> bool:
        return self.router.num_in_flight == 0 and all(
            client.gone or client.reason is not None for client in self.clients.values()
        )

    def check_end(self) -> None:
        """What must hold once everything has drained."""
        for request_id, client in self.clients.items():
            if client.gone:
                continue
            expected = [token_at(request_id, position) for position in range(len(client.tokens))]
            assert client.tokens == expected, f"{request_id}: wrong tokens"
            if client.reason == "length":
                assert len(client.tokens) == client.request.sampling.max_new_tokens
        for replica in self.replicas.values():
            blocks = replica.executor.blocks
            assert replica.executor.num_held == 0, f"{replica.name} holds {replica.executor.num_held} sequences"
            assert blocks.num_free == blocks.num_blocks, f"{replica.name}: the pool is not whole"
