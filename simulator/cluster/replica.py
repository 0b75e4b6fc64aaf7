"""One replica: the live scheduler and the live executor, with virtual time instead of a device.

It advances from event to event. Consecutive steps that only decode the same sequences form one run, up to the next step
in which anything can change. If an event arrives earlier, the finished steps are recorded and the run ends with the
current step, as it would on a device. A padded batch (``execution`` ``static``) has two runs, its prompts and its
outputs: an output that ends before the last one changes neither size nor price of the steps. A step that may be cut off
(``StepBatch.cut_off_s``) is a run of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from farsight.core.errors import IntegrityError, InvalidValueError
from farsight.core.messages.kv import OffloadQuestion
from farsight.core.messages.plans import FinishedSequence, Plan, WorkerReady, WorkerState
from farsight.core.messages.requests import Key
from farsight.core.request import Request, Residency
from farsight.kvcache import (
    BatchLimits,
    BlockManager,
    LeaseExecutor,
    PipelinedExecutor,
    StaticExecutor,
    StepBatch,
    StepItem,
)
from farsight.kvcache.step_batch import KVCopy, step_work
from farsight.policies.order.offload_orders import OffloadDecider
from farsight.policies.replica.events import (
    AskOffload,
    BatchBroken,
    CostLearned,
    Event,
    OffloadOrdered,
    OffloadUnanswered,
    RequestEnded,
    RequestGivenBack,
    RequestsAborted,
    RequestsArrived,
    RequestsRecalled,
    SendPlan,
    StepsRan,
    WorkerConnected,
    WorkerReported,
)
from farsight.policies.replica.scheduler import ReplicaScheduler
from farsight.simulator.cluster.latency import LatencyModel, StepRun
from farsight.simulator.cluster.memory_below import MemoryBelow, TieredExecutor
from farsight.simulator.cluster.records import Record, Recorder, ReplicaUsage

Execution = Literal["ragged", "static"]
"""As ``SchedulerConfig.execution``."""


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """Memory and limits of a replica.

    Attributes:
        look_every: Steps between two looks of the scheduler without an event, where time decides; 0: never.
        shares_prefixes: Whether sequences with equal prefixes share KV.
        execution: ``static`` pads a batch and returns it together.
        promises: Whether each request is told on arrival when it will end.
        num_stages: Stages of a pipeline, with a batch in flight each; latency is that of a batch in all stages.
        copies_block: Whether a step waits for the copies of KV that are ordered before it, as where no stream overlaps.
        offload_hop_s: From a question to the KV offload manager to its answer, there and back.
        tells_cache: Whether reports tell the scheduler what is cached.
        below: Tiers below the device's pool; None for a replica that knows none.
        num_states: As ``Device.num_states``.
        kept_states: States of prefixes that may be kept beside these, a prompt's every ``state_spacing`` tokens.

    Raises:
        InvalidValueError: ``num_stages`` is below 1, or above 1 for padded batches or with a hop.
    """

    num_blocks: int
    block_size: int = 16
    num_host_blocks: int = 0
    max_num_seqs: int = 256
    max_batch_tokens: int = 2048
    look_every: int = 0
    shares_prefixes: bool = False
    execution: Execution = "ragged"
    promises: bool = False
    num_stages: int = 1
    copies_block: bool = False
    offload_hop_s: float = 0.0
    tells_cache: bool = False
    below: MemoryBelow | None = None
    num_states: int = 0
    kept_states: int = 0
    state_spacing: int = 0

    def __post_init__(self) -> None:
        if self.num_stages < 1 or (self.num_stages > 1 and self.execution == "static"):
            raise InvalidValueError("num_stages", self.num_stages, "an integer >= 1, and 1 for padded batches")
        if self.num_stages > 1 and self.offload_hop_s:
            raise InvalidValueError("offload_hop_s", self.offload_hop_s, "0 where there are several stages")

    @property
    def num_tokens(self) -> int:
        """KV tokens that a replica holds."""
        return self.num_blocks * self.block_size

    def build_executor(self, incarnation: str) -> LeaseExecutor | StaticExecutor:
        """A worker's executor with empty pools."""
        blocks = BlockManager(self.num_blocks, self.block_size, most_sequences=self.num_states)
        limits = BatchLimits(self.max_num_seqs, self.max_batch_tokens)
        if self.execution == "static":
            return StaticExecutor(blocks, limits, incarnation, self.num_tokens)
        host = BlockManager(self.num_host_blocks, self.block_size) if self.num_host_blocks else None
        if self.below is not None:
            return TieredExecutor(blocks, limits, incarnation)
        if self.num_stages > 1:
            return PipelinedExecutor(blocks, limits, incarnation, host, max_in_flight=self.num_stages)
        return LeaseExecutor(blocks, limits, incarnation, host)


class Replica:
    """A scheduler and its worker in one object.

    Args:
        on_start: Called with each request at its first step, and its waiting time.
        on_end: Called with each ended request, at the instant of its last token.
        on_broken: Called with the name and the attempts of a batch that ran out of memory, which nothing runs any more.
            Not needed in continuous batching.
        offload: Answers what the scheduler asks about KV; None for one that asks nothing.
    """

    def __init__(
        self,
        name: str,
        scheduler: ReplicaScheduler,
        shape: ReplicaShape,
        latency: LatencyModel,
        recorder: Recorder,
        on_start: Callable[[Record, float], None],
        on_end: Callable[[Record, FinishedSequence], None],
        on_broken: Callable[[str, tuple[Key, ...]], None] | None = None,
        offload: OffloadDecider | None = None,
    ) -> None:
        self._offload = offload
        self._mail: list[tuple[float, Event]] = []  # of the KV offload manager, in order
        self.name = name
        self.scheduler = scheduler
        self.shape = shape
        self._latency = latency
        self._recorder = recorder
        self._usage = recorder.usage.setdefault(name, ReplicaUsage())
        self._on_start, self._on_end, self._on_broken = on_start, on_end, on_broken
        self.executor = shape.build_executor(name)
        self.executor.meter.cost = latency.cost
        if shape.shares_prefixes:
            self.executor.share_prefixes(self._block_hashes)
        if shape.kept_states and isinstance(self.executor, LeaseExecutor):
            self.executor.keep_states(shape.kept_states, shape.state_spacing)
        self._records: dict[str, Record] = {}
        self._given_back: list[Request] = []
        self._hashes: dict[str, list[int]] = {}
        self._run: StepRun | None = None
        self._plan: Plan | None = None  # Takes effect at the end of the current step.
        self._untold = False  # A run has ended that the scheduler does not know yet.
        self._broke_off = False  # A batch has, and the scheduler does not know yet that the worker has dropped it.
        self._counted_preemptions = 0
        self._copies: list[tuple[float, int]] = []  # (done at, copy id), in order
        self._landed: list[int] = []  # Finished copies, recorded at the end of the current step.
        self._own_names = itertools.count(1 << 62)
        self._link_free_at = {Residency.DEVICE: 0.0, Residency.HOST: 0.0}
        if shape.tells_cache:
            self.executor.tell_cache()
        self._set_up()
        self._connect()

    def _set_up(self) -> None:
        """Makes what a kind of replica keeps beside this."""

    def _connect(self) -> None:
        shape = self.shape
        num_blocks, num_host_blocks = shape.num_blocks, shape.num_host_blocks
        ready = WorkerReady(self.name, num_blocks, shape.block_size, shape.num_tokens, True, 0, num_host_blocks)
        self.ready = ready
        state = WorkerState(self.executor.take_over(), ready, (), self.executor.report())
        self._tell(WorkerConnected(state), 0.0)
        self._tell(CostLearned(self._latency.cost), 0.0)

    @property
    def wakes_at(self) -> float:
        """The instant of the next event of this replica; infinity if there is none."""
        run = self._run
        run_wakes_at = math.inf if run is None else min(run.ends_at, self._looks_at(run))
        mail_at = self._mail[0][0] if self._mail else math.inf
        return min(run_wakes_at, mail_at, self._copies[0][0] if self._copies else math.inf)

    def _looks_at(self, run: StepRun) -> float:
        """The instant of the scheduler's next call during a run; infinity if it is not before the run's end."""
        num_steps = run.num_told + self.shape.look_every
        if not self.shape.look_every or num_steps >= run.num_steps or not self._looks:
            return math.inf
        return run.began_at + run.seconds(num_steps)

    @property
    def used_tokens(self) -> int:
        """KV tokens of the allocated blocks."""
        blocks = self.executor.blocks
        return (blocks.num_blocks - blocks.num_free) * blocks.block_size

    def used_tokens_at(self, now: float) -> int:
        """The same, including the steps of the current run that are over by ``now``."""
        run = self._run
        return self.used_tokens + (0 if run is None else run.work.decode_seqs * run.steps_over(now))

    def tokens_at(self, now: float) -> dict[str, int]:
        """Output tokens of each request that has any, including those of the current run up to ``now``."""
        counts = {request_id: record.num_tokens for request_id, record in self._records.items() if record.num_tokens}
        run = self._run
        if run is not None and (num_steps := run.steps_over(now)):
            for item in run.batch.items:
                if item.samples:
                    counts[item.request_id] = counts.get(item.request_id, 0) + num_steps
        return counts

    def submit(self, requests: list[tuple[Request, Record]], now: float) -> None:
        """Adds arriving requests."""
        for request, record in requests:
            record.replica = self.name
            self._records[request.request_id] = record
            self._hashes[request.request_id] = list(request.prefix_hashes)
        if self._run is not None and (self.scheduler.num_waiting == 0 or self.scheduler.order.preemptive):
            self._tell_steps(self._run, self._run.steps_over(now), now)
        self._tell(RequestsArrived(tuple(request for request, _ in requests)), now)
        if self.shape.promises:
            for promise in self.scheduler.promise([request.request_id for request, _ in requests], now):
                self._records[promise.request_id].promise = promise
        if self._run is None:
            self._begin(now)

    def drop(self, request_id: str, now: float) -> None:
        """Forgets a request that has not begun: its client has left."""
        del self._records[request_id]
        self._hashes.pop(request_id, None)
        self._tell(RequestsAborted(((request_id, 0),)), now)

    def recall(self, keys: tuple[Key, ...], now: float) -> tuple[Request, ...]:
        """Gives back those of these attempts that no plan has named yet."""
        self._tell(RequestsRecalled(keys), now)
        given, self._given_back = tuple(self._given_back), []
        for request in given:
            del self._records[request.request_id], self._hashes[request.request_id]
        return given

    def wake(self, now: float) -> None:
        """Handles the event at ``wakes_at``: steps or copies are over."""
        while self._copies and self._copies[0][0] <= now:
            self._landed.append(self._copies.pop(0)[1])
            self._cut(now)
        while self._mail and self._mail[0][0] <= now:
            self._tell(self._mail.pop(0)[1], now)
        run = self._run
        if run is not None and run.ends_at > now >= self._looks_at(run):
            self._tell_steps(run, run.num_told + self.shape.look_every, now)
            if self._plan is not None:  # The scheduler has changed the next step.
                run.num_steps, run.ends_at = run.num_told, now
        if run is not None and run.ends_at <= now:
            self._run = None
            self._untold = True
            if self._book(run) or self._looks:
                self._report(now)
        if self._run is None:
            self._begin(now)

    def _tell_steps(self, run: StepRun, num_steps: int, now: float) -> None:
        """Reports the first steps of a run to the scheduler, and earlier unreported steps."""
        if self._untold:
            self._report(now)
        new = num_steps - run.num_told
        if new > 0 and not run.work.prefill_tokens:
            seconds = run.seconds(num_steps) - run.seconds(run.num_told)
            run.num_told = num_steps
            services = self.executor.services_after(run.batch, run.seconds(num_steps), num_steps)
            self._tell(StepsRan(tuple(item.request_id for item in run.batch.items), new, seconds, services), now)

    @property
    def _looks(self) -> bool:
        """Whether the scheduler may change its decision although no request has ended."""
        scheduler = self.scheduler
        if self.executor.short_blocks or self._copies or self._landed:
            return True
        return bool(self.shape.look_every) and (scheduler.num_waiting > 0 or scheduler.order.preemptive)

    def _tell(self, event: Event, now: float) -> None:
        """Applies the scheduler's instructions between steps: now, or at the end of the current step."""
        for instruction in self.scheduler.handle(event, now):
            match instruction:
                case SendPlan(plan):
                    self._take(plan, now)
                case AskOffload(question):
                    self._ask(question, now)
                case RequestEnded(finished):
                    self._end(finished, now)
                case RequestGivenBack(request):
                    self._given_back.append(request)
                case BatchBroken(keys):
                    self._break_off(keys)

    def _ask(self, question: OffloadQuestion, now: float) -> None:
        """The answer takes a hop; the scheduler goes on alone if that is longer than it waits."""
        if self._offload is None:
            raise IntegrityError(f"replica {self.name}: a question about KV, and nothing answers it")
        answer = OffloadOrdered(self._offload.decide(question))
        hop_s, deadline_s = self.shape.offload_hop_s, self.scheduler.limits.offload_deadline_s
        if not hop_s:
            self._tell(answer, now)
            return
        if hop_s >= deadline_s:
            self._mail.append((now + deadline_s, OffloadUnanswered(question.seq)))
        self._mail.append((now + hop_s, answer))
        self._mail.sort(key=_instant)

    def _take(self, plan: Plan, now: float) -> None:
        self._plan = plan
        self._cut(now)
        if self.scheduler.num_preemptions > self._counted_preemptions:
            self._counted_preemptions = self.scheduler.num_preemptions
            for slot in plan.slots:
                record = self._records[slot.request_id]
                record.num_evictions, record.num_swaps = slot.num_preemptions, (slot.num_moves + 1) // 2

    def _end(self, finished: FinishedSequence, now: float) -> None:
        record = self._records.pop(finished.request_id)
        self._hashes.pop(finished.request_id, None)
        record.finished_at = record.last_token_at
        self._recorder.done.append(record)
        self._on_end(record, finished)

    def _break_off(self, keys: tuple[Key, ...]) -> None:
        for request_id, _ in keys:
            self._records.pop(request_id).num_evictions += 1
            self._hashes.pop(request_id, None)
        self._broke_off = True
        if self._on_broken is None:
            raise IntegrityError(f"replica {self.name}: a batch broke off, and nothing takes its requests")
        self._on_broken(self.name, keys)

    def _report(self, now: float) -> None:
        self._untold = False
        report = self.executor.report()
        self.executor.acknowledge(report.report_seq)
        self._tell(WorkerReported(report), now)

    def _begin(self, now: float) -> None:
        """Starts the next run, if any request can run."""
        batch = self._prepare(now)
        if batch is not None:
            began_at = self._copies[-1][0] if self._copies and self.shape.copies_block else now
            self._run = run = StepRun(batch, step_work(batch), self._latency, began_at, 1)
            run.end_after(self._steps_until_change(run))

    def _prepare(self, now: float) -> StepBatch | None:
        """The next batch, after copies that have landed are booked; begins the copies that it asks for."""
        if self._landed:
            for copy_id in self._landed:
                self._complete_copy(copy_id, now)
            self._landed.clear()
            self._report(now)
        batch = self._relieve(self._next_batch(), now)
        if self._broke_off:
            self._broke_off = False
            self._report(now)
        self._begin_copies(now)
        return batch

    def _relieve(self, batch: StepBatch | None, now: float) -> StepBatch | None:
        """The batch after the scheduler's answers to memory pressure, which take no time."""
        for _ in range(len(self._records)):  # A useful answer removes a request; other answers could repeat for ever.
            if not self.executor.short_blocks:
                break
            self._report(now)
            if self._plan is None:
                break
            batch = self._next_batch()
        return batch

    def _next_batch(self) -> StepBatch | None:
        if self._plan is not None:
            self.executor.apply_plan(self._plan)
            self._plan = None
        return self.executor.next_batch()

    def _begin_copies(self, now: float) -> None:
        """Copies in one direction are sequential; copies in both directions and steps overlap."""
        for copy in self.executor.take_copies():
            done_at = self._copy_done_at(copy, now)
            if done_at is not None:
                self._copies.append((done_at, copy.copy_id))
        self._copies.sort()

    def _copy_done_at(self, copy: KVCopy, now: float) -> float | None:
        """Returns when a copy that begins now is done; None where no step is to end for it."""
        begins_at = max(now, self._link_free_at[copy.to])
        self._link_free_at[copy.to] = begins_at + self._latency.copy_s(len(copy.source) * self.shape.block_size)
        return self._link_free_at[copy.to]

    def _complete_copy(self, copy_id: int, now: float) -> None:
        self.executor.complete_copy(copy_id)

    def _steps_until_change(self, run: StepRun) -> int:
        """How often the batch can be repeated: until an output ends or, in a padded batch, the last one does."""
        if run.work.prefill_tokens or not run.batch.items:  # padded: all have ended
            return 1
        arrivals = [self._records[item.request_id].arrival for item in run.batch.items]
        ends = [each.prompt_len + each.output_len for each in arrivals]
        left = [end - item.start - item.num_tokens for end, item in zip(ends, run.batch.items, strict=True)]
        most = max(left) if self.executor.returns_together else max(1, min(left))
        return min(most, self.executor.horizon(run.batch, most))

    def _output_len(self, item: StepItem) -> int:
        """Output tokens of the sequence before a step that computes this item as its last known tokens."""
        return item.start + item.num_tokens - self._records[item.request_id].arrival.prompt_len

    def _cut(self, now: float) -> None:
        """Ends a run with its current step."""
        run = self._run
        if run is not None:
            run.end_after(min(run.num_steps, run.steps_over(now) + 1))

    def _book(self, run: StepRun) -> bool:
        """Records a finished run; returns whether a request ended."""
        seconds, num_steps = run.seconds(run.num_steps), run.num_steps
        if run.is_cut_off:
            self._use(run, seconds)
            self.executor.cut_off(run.batch, seconds)
            return False
        if isinstance(self.executor, StaticExecutor):
            return self._book_padded(self.executor, run, seconds)
        first_at, last_at = run.began_at + run.seconds(1), run.began_at + seconds
        last_s = seconds - run.seconds(num_steps - 1)
        stopped = []
        for item in run.batch.items:
            if not item.samples or not self.executor.counts(run.batch, item.request_id):
                continue
            record = self._records[item.request_id]
            if record.num_tokens == 0:
                record.cached_len = self.executor.sequences[item.request_id].cached_len or 0
                self._on_start(record, run.began_at - record.arrival.arrived_at)
            self._recorder.tokens(record, num_steps, first_at, last_s, last_at)
            self._usage.num_output_tokens += num_steps
            if record.num_tokens >= record.arrival.output_len < record.arrival.max_new_tokens:
                stopped.append(item.request_id)
        self._use(run, seconds)
        return bool(self.executor.commit(run.batch, stopped, duration_s=seconds, num_steps=num_steps))

    def _book_padded(self, executor: StaticExecutor, run: StepRun, seconds: float) -> bool:
        """The outputs of a padded batch are returned together when its last step is over."""
        batch, stopped_after = run.batch, {}
        for item in batch.items:
            if not item.samples:
                continue
            record = self._records[item.request_id]
            arrival, output_len = record.arrival, self._output_len(item)
            if output_len == 0:
                self._on_start(record, run.began_at - arrival.arrived_at)
            num_steps = arrival.output_len - output_len
            if num_steps <= run.num_steps and arrival.output_len < arrival.max_new_tokens:
                stopped_after[item.request_id] = num_steps
        self._usage.num_output_tokens += run.num_steps * sum(item.samples for item in batch.items + batch.padding.items)
        self._use(run, seconds)
        finished = executor.commit(batch, duration_s=seconds, num_steps=run.num_steps, stopped_after=stopped_after)
        for each in finished:
            record = self._records[each.request_id]
            record.num_tokens = each.output_len
            record.first_token_at = record.last_token_at = run.began_at + seconds
        return bool(finished)

    def _use(self, run: StepRun, seconds: float) -> None:
        usage, num_steps, work = self._usage, run.num_steps, run.work
        usage.num_steps += num_steps
        usage.num_sequence_steps += num_steps * len(run.batch.items)
        usage.busy_s += seconds
        usage.num_prompt_tokens += work.prefill_tokens
        used, grown = self.used_tokens, work.decode_seqs * (num_steps - 1)
        usage.token_steps += num_steps * (used + grown / 2)
        # A padded batch grows within one run to the size with which it ends.
        peak_tokens = used + grown if self.executor.returns_together else used
        usage.peak_tokens = max(usage.peak_tokens, peak_tokens)

    def _block_hashes(self, request_id: str, num_blocks: int) -> list[int]:
        """The block names of the request's prompt, then names of its output blocks."""
        hashes = self._hashes[request_id]
        while len(hashes) < num_blocks:
            hashes.append(next(self._own_names))
        return hashes


def _instant(letter: tuple[float, Event]) -> float:
    return letter[0]
