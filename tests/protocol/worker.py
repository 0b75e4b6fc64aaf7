"""A ModelWorker: the real ``engine.Worker`` on a pretended device; and a KVOffloadManager, the real policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from farsight.actors.worker.token_channels import TokenOutbox
from farsight.core.messages.kv import BlockName, OffloadOrders, OffloadQuestion
from farsight.core.messages.plans import FinishedSequence, Plan, ReportPoll, StepReport, WorkerReady, WorkerState
from farsight.core.messages.tokens import TokenBatches, TokenPoll
from farsight.core.request import Residency
from farsight.engine.emission import Emission, Output
from farsight.engine.sequence import Detokenizer
from farsight.engine.worker import Worker
from farsight.kvcache import BatchLimits, BlockManager, KVCopy, LeaseExecutor, PlanExecutor, StaticExecutor, StepBatch
from farsight.kvcache.tiers import KVTiers
from farsight.policies.order.offload_orders import OffloadDecider
from tests.protocol.model import BLOCK, EOS, Device, LaggingDetokenizer
from tests.protocol.network import Component, attempts

if TYPE_CHECKING:
    from tests.protocol.world import World

STEP_S, REPORT_S, IDLE_S, SILENCE_S, TICK_S = 0.02, 0.02, 1.0, 2.0, 0.5
MAX_DELTAS = 6
"""An ingress that leaves so many unacknowledged lets all its sequences rest."""

SendReport = Callable[[StepReport], None]
SendBatches = Callable[[TokenBatches], None]


@dataclass(slots=True)
class _Channel:
    """What one ingress replica gets; ``waiting`` answers its poll."""

    outbox: TokenOutbox
    heard_at: float
    sent_at: float = -1.0
    slow: frozenset[str] = frozenset()
    waiting: SendBatches | None = None

    @property
    def full(self) -> bool:
        return self.outbox.num_deltas >= MAX_DELTAS


@dataclass(slots=True)
class _Reports:
    """When the Scheduler's poll is answered."""

    due: bool = False
    sent_at: float = -1.0
    waiting: SendReport | None = None
    plan: tuple[int, int] = (0, 0)  # lease and number of the last one applied
    offered: dict[tuple[int, int], Plan] = field(default_factory=dict)


class SlowCopier:
    """Copies take their time, overtake each other and sometimes fail; what they read is what is there at their end."""

    def __init__(self, component: WorkerComponent, num_host_blocks: int) -> None:
        self._component = component
        self._host = [[-1] * BLOCK for _ in range(num_host_blocks)]
        self._done: list[tuple[int, bool]] = []
        self._on_done: Callable[[], object] = lambda: None
        self._rows: dict[BlockName, list[int]] = {}  # of the host tier
        self.tiers: KVTiers | None = None

    def when_done(self, callback: Callable[[], object]) -> None:
        self._on_done = callback

    def look(self, names: Sequence[int], tenant: str) -> None: ...

    def _drop(self) -> None:
        for tier, block in () if self.tiers is None else self.tiers.take_dropped():
            (self._rows if tier is Residency.HOST else self._component.world.disk).pop(block, None)

    def begin(self, copy: KVCopy) -> None:
        self._drop()
        if copy.names and copy.target:
            self._component.device.blocks_return(copy.target[0])
        rng = self._component.world.copy_rng
        failed = rng.random() < 0.1
        self._component.later(rng.choice([0.0, 0.01, 0.1, 0.5]), lambda: self._end(copy, failed))

    def _end(self, copy: KVCopy, failed: bool) -> None:
        device, world = self._component.device.kv, self._component.world
        if copy.names:
            self._end_below(copy, failed)
            return
        source, target = (device, self._host) if copy.to is Residency.HOST else (self._host, device)
        for read, written in zip(copy.source, copy.target, strict=True):
            target[written] = [-1] * BLOCK if failed else list(source[read])
        world.count(f"{'failed' if failed else 'whole'} copies to {copy.to.name}", True)
        self._done.append((copy.copy_id, failed))
        self._on_done()

    def _end_below(self, copy: KVCopy, failed: bool) -> None:
        """Ends a copy to a tier or from one; a file is now and then damaged."""
        device, world = self._component.device.kv, self._component.world
        if copy.to is Residency.DEVICE and self.tiers is not None:
            num_good = 0
            for block, target in zip(copy.names, copy.target, strict=True):
                row = self._rows.get(block) or world.disk.get(block)
                if row is None or failed or world.tier_rng.random() < 0.1:
                    break
                device[target] = list(row)
                num_good += 1
            self.tiers.outcomes[copy.copy_id] = num_good, 0.01
            world.count("blocks that came back", num_good > 0)
            world.count("blocks that were damaged", num_good < len(copy.names))
        elif copy.source and not failed:
            below = self._rows if copy.to is Residency.HOST else world.disk
            for block, source in zip(copy.names, copy.source, strict=True):
                if self._component.worker.executor.blocks.has_read(source, block.name):
                    below[block] = list(device[source])
        elif not failed:
            world.disk.update((block, self._rows[block]) for block in copy.names if block in self._rows)
        self._done.append((copy.copy_id, failed))
        self._on_done()

    def take_done(self) -> list[tuple[int, bool]]:
        self._drop()
        done, self._done = self._done, []
        return done

    def wait(self) -> None: ...


class ManagerComponent(Component):
    """One life of a KVOffloadManager."""

    def __init__(self, world: World, replica: str, decider: OffloadDecider) -> None:
        super().__init__(world, f"manager-{replica}")
        self._decider = decider

    def decide(self, question: OffloadQuestion, reply: Callable[[OffloadOrders], None]) -> None:
        reply(self._decider.decide(question))


class WorkerComponent(Component):
    """One life of a worker."""

    def __init__(self, world: World, name: str, incarnation: str, num_blocks: int, limits: BatchLimits) -> None:
        super().__init__(world, name)
        blocks = BlockManager(num_blocks, BLOCK)
        num_host_blocks = 0 if world.is_static else world.num_host_blocks
        host = BlockManager(num_host_blocks, BLOCK) if num_host_blocks else None
        self.device = Device(limits, blocks, world.clients)
        executor: PlanExecutor = LeaseExecutor(blocks, limits, incarnation, host)
        if world.is_static:
            executor = StaticExecutor(blocks, limits, incarnation, num_blocks * BLOCK)
        if world.placement == "e2" and not world.is_static:
            executor.tell_cache()
        copier = SlowCopier(self, num_host_blocks)
        if world.tier_limits is not None and isinstance(executor, LeaseExecutor):
            copier.tiers = KVTiers(world.tier_limits)
            copier.tiers.learn(world.disk)
            executor.keep_tiers(copier.tiers)
        ready = WorkerReady(incarnation, num_blocks, BLOCK, num_blocks * BLOCK, True, 1000, num_host_blocks)
        self.worker = Worker(
            self.device,
            executor,
            cast(Detokenizer, LaggingDetokenizer()),  # what a worker asks one for, and no more
            (EOS,),
            ready,
            prefix_cache=not world.is_static,
            copier=copier,
        )
        self.worker.when_copied(self._wake)
        self._channels: dict[str, _Channel] = {}
        self._reports = _Reports()
        self._steps = False  # or is about to
        self._computes = False
        self._watches = False
        self._looks = False  # for silent ingress replicas, when this step is over

    @property
    def executor(self) -> PlanExecutor:
        return self.worker.executor

    def connect(self, message: None, reply: Callable[[WorkerState], None]) -> None:
        """A Scheduler takes over, perhaps in the middle of a step."""
        state = self.worker.take_over()
        self.world.count("take-overs with sequences", bool(state.held))
        self.world.tell(self.life.name, "taken over under lease %s with %s", state.lease, attempts(state.held))
        self._check()
        reply(state)

    def push_plan(self, plan: Plan) -> None:
        self._reports.offered[plan.lease, plan.plan_seq] = plan
        self.worker.offer_plan(plan)
        self._wake()

    def poll_report(self, poll: ReportPoll, send: SendReport) -> None:
        """Answers at once when something is due, and in a while when not."""
        self.executor.acknowledge(poll.ack_seq)
        if poll.wants_cache:
            self.executor.tell_whole_cache()
        self._reports.waiting = send
        self._send_report()
        self.later(IDLE_S, self._send_report)

    def _send_report(self) -> None:
        reports = self._reports
        send = reports.waiting
        idle = self.world.clock.now - reports.sent_at >= IDLE_S
        if send is None or not (reports.due or idle):
            return
        reports.due, reports.waiting, reports.sent_at = False, None, self.world.clock.now
        send(self.executor.report())

    def _mark_report(self, *, urgent: bool) -> None:
        if urgent or self.world.clock.now - self._reports.sent_at >= REPORT_S:
            self._reports.due = True
            self._send_report()

    def poll_tokens(self, poll: TokenPoll, send: SendBatches) -> None:
        """What was sent and not acknowledged comes again at once."""
        channel = self._channel(poll.ingress_id)
        was_full = channel.full
        channel.outbox.acknowledge(poll.ack_seq)
        channel.heard_at, channel.waiting = self.world.clock.now, send
        slow = frozenset(poll.slow)
        if was_full or slow != channel.slow:
            channel.slow = slow
            self._stall()
            self._wake()
        if channel.outbox.num_deltas:
            self._send_tokens(channel)
        else:
            self.later(IDLE_S, lambda: self._send_idle(channel))

    def _send_idle(self, channel: _Channel) -> None:
        if self.world.clock.now - channel.sent_at >= IDLE_S:
            self._send_tokens(channel)

    def _send_tokens(self, channel: _Channel) -> None:
        send, channel.waiting = channel.waiting, None
        if send is not None:
            channel.heard_at = channel.sent_at = self.world.clock.now
            send(channel.outbox.take())

    def _channel(self, ingress_id: str) -> _Channel:
        channel = self._channels.get(ingress_id)
        if channel is None:
            outbox = TokenOutbox(self.worker.ready.worker_incarnation)
            channel = self._channels[ingress_id] = _Channel(outbox, self.world.clock.now)
        return channel

    def _stall(self) -> None:
        self.worker.stall({name: None if channel.full else channel.slow for name, channel in self._channels.items()})
        self._check()

    def _wake(self) -> None:
        if not self._steps:
            self._steps = True
            self.later(0.0, self._begin)

    def _begin(self) -> None:
        batch = self.worker.begin_step()
        self._note_plan()
        self._check()
        if batch is None:
            self._steps = False
            self._mark_report(urgent=True)
            return
        self.device.resting = self._resting()
        tokens = self.worker.execute(batch)
        self._computes = True
        self.later(STEP_S, lambda: self._finish(batch, tokens))

    def _resting(self) -> frozenset[str]:
        return frozenset(self.executor.sequences.keys() & self.executor._stalled)

    def _note_plan(self) -> None:
        """Brings the grants in force up to date."""
        reports, before = self._reports, self.device.slots
        plan = reports.offered.get((self.executor.lease, self.executor.plan_seq))
        if plan is None or (plan.lease, plan.plan_seq) == reports.plan:
            return
        reports.plan = plan.lease, plan.plan_seq
        self.world.check_one_worker(self.life.name, self.executor)
        self.device.places = tuple((slot.request_id, slot.attempt) for slot in plan.slots if not slot.standby)
        self.device.slots = {}
        for slot in plan.slots:
            if not self.executor.holds(slot.request_id):
                continue
            old = before.get(slot.request_id, slot)
            self.device.slots[slot.request_id] = old if old.attempt > slot.attempt else slot
            self.world.count("fenced attempts", old.attempt < slot.attempt)
            self.world.count("preemptions", old.num_preemptions < slot.num_preemptions)
        reports.offered = {key: offered for key, offered in reports.offered.items() if key > reports.plan}
        self._watch_ingresses()

    def _finish(self, batch: StepBatch, tokens: list[int | None]) -> None:
        """Text is made when the next step runs already."""
        self._computes = False
        emissions: list[Emission] = []
        failures: list[Output] = []
        if self.world.breaks_step(batch):
            failures = self.worker.fail_step(batch, RuntimeError("device on fire"))
            self.device.ended |= {(output.delta.request_id, output.delta.attempt) for output in failures}
        else:
            emissions = self.worker.commit_step(batch, tokens, STEP_S)
            self.world.count("static batches with padding", bool(batch.padding.items))
            self.world.count("static batches returned", self.world.is_static and bool(emissions))
            self._note_ends(emission.end for emission in emissions)
        self._check()
        if self._looks:
            self._abort_silent()
        self._begin()
        outputs = self.worker.render(emissions) + failures
        self._dispatch(outputs)
        ended = any(output.delta.finish_reason for output in outputs)
        self._mark_report(urgent=ended or self.executor.short_blocks > 0)

    def _note_ends(self, ends: Iterable[FinishedSequence | None]) -> None:
        self.device.ended |= {(end.request_id, end.attempt) for end in ends if end is not None}

    def _dispatch(self, outputs: list[Output]) -> None:
        channels = {}
        for output in outputs:
            if output.delta.finish_reason is not None:
                self.device.ended.add((output.delta.request_id, output.delta.attempt))
            channels[output.ingress_id] = self._channel(output.ingress_id)
            channels[output.ingress_id].outbox.put(output.delta)
        for channel in channels.values():
            self._send_tokens(channel)
        if any(channel.full or channel.slow for channel in self._channels.values()):
            self._stall()
            self.world.count("stalls", bool(self._resting()))

    def _watch_ingresses(self) -> None:
        """Ends what belongs to ingress replicas that have died; looks again while it holds anything."""
        if self._watches or not self.executor.num_held:
            return
        self._watches = True
        for ingress_id in self.worker.ingress_ids:
            self._channel(ingress_id)
        self.later(TICK_S, self._abort_silent)

    def _abort_silent(self) -> None:
        self._looks = self._computes
        if self._looks:
            return
        self._watches = False
        now = self.world.clock.now
        for ingress_id, channel in self._channels.items():
            if channel.waiting is None and now - channel.heard_at >= SILENCE_S:
                if ingress_id in self.world.network.living:
                    self.world.count("silent ingresses that live", ingress_id in self.worker.ingress_ids)
                else:
                    self._abort_ingress(ingress_id)
        self._watch_ingresses()

    def _abort_ingress(self, ingress_id: str) -> None:
        outputs = self.worker.abort_ingress(ingress_id)
        if outputs:
            self.world.count("dead ingresses", True)
            self.world.tell(self.life.name, "%s is dead: %s aborted", ingress_id, len(outputs))
            self._check()
            self._dispatch(outputs)
            self._mark_report(urgent=True)
            self._wake()

    def _check(self) -> None:
        self.worker.check_integrity()
