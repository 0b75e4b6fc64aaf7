"""One replica: the live scheduler and the live executor, with virtual time instead of a device.

It advances from event to event. Consecutive steps that only decode the same sequences form one run, up to the next step
in which anything can change. If an event arrives earlier, the finished steps are recorded and the run ends with the
current step, as it would on a device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from core.costs import attention_pairs
from core.messages.plans import FinishedSequence, Plan, WorkerReady, WorkerState
from core.request import Request, Residency
from kvcache import BatchLimits, BlockManager, LeaseExecutor, StepBatch
from policies.replica.events import (
    CostLearned,
    Event,
    RequestEnded,
    RequestsArrived,
    SendPlan,
    StepsRan,
    WorkerConnected,
    WorkerReported,
)
from policies.replica.scheduler import ReplicaScheduler
from simulator.cluster.latency import LatencyModel
from simulator.cluster.records import Record, Recorder, Usage


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """Memory and limits of a replica.

    Attributes:
        look_every: Steps between two calls of the scheduler without an event, while a request waits or could be
        preempted; 0 for never. Needed if a decision depends on time or on random draws.
        shares_prefixes: Whether sequences with equal prefixes share KV.
    """

    num_blocks: int
    block_size: int = 16
    num_host_blocks: int = 0
    max_num_seqs: int = 256
    max_batch_tokens: int = 2048
    look_every: int = 0
    shares_prefixes: bool = False


@dataclass(slots=True)
class _Run:
    """Equal steps in progress, recorded when the last is over; ``num_told`` of them were reported to the scheduler."""

    batch: StepBatch
    began_at: float
    num_steps: int
    ends_at: float
    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    prefill_pairs: int
    num_told: int = 0


class Replica:
    """A scheduler and its worker in one object.

    Args:
        on_start: Called with each request at its first step, and its waiting time.
        on_end: Called with each ended request, at the instant of its last token.
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
    ) -> None:
        self.name = name
        self.scheduler = scheduler
        self.shape = shape
        self._latency = latency
        self._recorder = recorder
        self._usage = recorder.usage.setdefault(name, Usage())
        self._on_start, self._on_end = on_start, on_end
        host = BlockManager(shape.num_host_blocks, shape.block_size) if shape.num_host_blocks else None
        blocks = BlockManager(shape.num_blocks, shape.block_size)
        limits = BatchLimits(shape.max_num_seqs, shape.max_batch_tokens)
        self.executor = LeaseExecutor(blocks, limits, incarnation=name, host=host)
        if shape.shares_prefixes:
            self.executor.share_prefixes(self._block_hashes)
        self._records: dict[str, Record] = {}
        self._hashes: dict[str, list[int]] = {}
        self._run: _Run | None = None
        self._plan: Plan | None = None  # Takes effect at the end of the current step.
        self._untold = False  # A run has ended that the scheduler does not know yet.
        self._counted_preemptions = 0
        self._copies: list[tuple[float, int]] = []  # (done at, copy id), in order
        self._landed: list[int] = []  # Finished copies, recorded at the end of the current step.
        self._own_names = itertools.count(1 << 62)
        self._link_free_at = {Residency.DEVICE: 0.0, Residency.HOST: 0.0}
        self._connect()

    def _connect(self) -> None:
        shape = self.shape
        size = shape.num_blocks * shape.block_size
        ready = WorkerReady(self.name, shape.num_blocks, shape.block_size, size, True, 0, shape.num_host_blocks)
        self.ready = ready
        state = WorkerState(self.executor.take_over(), ready, (), self.executor.report())
        self._tell(WorkerConnected(state), 0.0)
        self._tell(CostLearned(self._latency.cost), 0.0)

    @property
    def wakes_at(self) -> float:
        """The instant of the next event of this replica; infinity if there is none."""
        run = self._run
        run_wakes_at = math.inf if run is None else min(run.ends_at, self._looks_at(run))
        return min(run_wakes_at, self._copies[0][0]) if self._copies else run_wakes_at

    def _looks_at(self, run: _Run) -> float:
        """The instant of the scheduler's next call during a run; infinity if it is not before the run's end."""
        num_steps = run.num_told + self.shape.look_every
        if not self.shape.look_every or num_steps >= run.num_steps or not self._looks:
            return math.inf
        return run.began_at + self._seconds(run, num_steps)

    @property
    def used_tokens(self) -> int:
        """KV tokens of the allocated blocks."""
        blocks = self.executor.blocks
        return (blocks.num_blocks - blocks.num_free) * blocks.block_size

    def used_tokens_at(self, now: float) -> int:
        """The same, including the steps of the current run that are over by ``now``."""
        run = self._run
        return self.used_tokens + (0 if run is None else run.decode_seqs * self._steps_over(run, now))

    def submit(self, requests: list[tuple[Request, Record]], now: float) -> None:
        """Adds arriving requests."""
        for request, record in requests:
            record.replica = self.name
            self._records[request.request_id] = record
            self._hashes[request.request_id] = list(request.prefix_hashes)
        if self._run is not None and (self.scheduler.num_waiting == 0 or self.scheduler.order.preemptive):
            self._tell_steps(self._run, self._steps_over(self._run, now), now)
        self._tell(RequestsArrived(tuple(request for request, _ in requests)), now)
        if self._run is None:
            self._begin(now)

    def wake(self, now: float) -> None:
        """Handles the event at ``wakes_at``: steps or copies are over."""
        while self._copies and self._copies[0][0] <= now:
            self._landed.append(self._copies.pop(0)[1])
            self._cut(now)
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

    def _tell_steps(self, run: _Run, num_steps: int, now: float) -> None:
        """Reports the first steps of a run to the scheduler, and earlier unreported steps."""
        if self._untold:
            self._report(now)
        new = num_steps - run.num_told
        if new > 0 and not run.prefill_tokens:
            seconds = self._seconds(run, num_steps) - self._seconds(run, run.num_told)
            run.num_told = num_steps
            self._tell(StepsRan(tuple(item.request_id for item in run.batch.items), new, seconds), now)

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
                case RequestEnded(finished):
                    self._end(finished, now)

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

    def _report(self, now: float) -> None:
        self._untold = False
        report = self.executor.report()
        self.executor.acknowledge(report.report_seq)
        self._tell(WorkerReported(report), now)

    def _begin(self, now: float) -> None:
        """Starts the next run, if any request can run. The scheduler answers memory pressure in no time."""
        if self._landed:
            for copy_id in self._landed:
                self.executor.complete_copy(copy_id)
            self._landed.clear()
            self._report(now)
        batch = self._next_batch()
        for _ in range(len(self._records)):  # A useful answer removes a request; other answers could repeat for ever.
            if not self.executor.short_blocks:
                break
            self._report(now)
            if self._plan is None:
                break
            batch = self._next_batch()
        self._begin_copies(now)
        if batch is not None:
            self._run = run = self._make_run(batch, now)
            run.ends_at = now + self._seconds(run, run.num_steps)

    def _next_batch(self) -> StepBatch | None:
        if self._plan is not None:
            self.executor.apply_plan(self._plan)
            self._plan = None
        return self.executor.next_batch()

    def _begin_copies(self, now: float) -> None:
        """Copies in one direction are sequential; copies in both directions and steps overlap."""
        for copy in self.executor.take_copies():
            begins_at = max(now, self._link_free_at[copy.to])
            done_at = begins_at + self._latency.copy_s(len(copy.source) * self.shape.block_size)
            self._link_free_at[copy.to] = done_at
            self._copies.append((done_at, copy.copy_id))
        self._copies.sort()

    def _make_run(self, batch: StepBatch, now: float) -> _Run:
        prefill = decode_seqs = context = pairs = 0
        left: float = math.inf
        for item in batch.items:
            if item.num_tokens == 1:
                decode_seqs += 1
                context += item.start + 1
            else:
                prefill += item.num_tokens
                pairs += attention_pairs(item.num_tokens, item.start)
            record = self._records[item.request_id]
            left = min(left, record.arrival.output_len - record.num_tokens)
        num_steps = 1 if prefill else int(min(left, self.executor.horizon(batch)))
        return _Run(batch, now, max(1, num_steps), math.inf, prefill, decode_seqs, context, pairs)

    def _seconds(self, run: _Run, num_steps: int) -> float:
        """Seconds of the first steps of a run."""
        if num_steps == 0:
            return 0.0
        if run.prefill_tokens:
            return self._latency.step_s(run.prefill_tokens, run.decode_seqs, run.context_tokens, run.prefill_pairs)
        return self._latency.decode_run_s(run.decode_seqs, run.context_tokens, num_steps)

    def _steps_over(self, run: _Run, now: float) -> int:
        """The number of steps of a run that are over by now."""
        low, high = run.num_told, run.num_steps
        while low < high:
            middle = (low + high + 1) // 2
            if run.began_at + self._seconds(run, middle) <= now:
                low = middle
            else:
                high = middle - 1
        return low

    def _cut(self, now: float) -> None:
        """Ends a run with its current step."""
        run = self._run
        if run is not None:
            run.num_steps = min(run.num_steps, self._steps_over(run, now) + 1)
            run.ends_at = run.began_at + self._seconds(run, run.num_steps)

    def _book(self, run: _Run) -> bool:
        """Records a finished run; returns whether a request ended."""
        seconds = self._seconds(run, run.num_steps)
        first_at, last_at = run.began_at + self._seconds(run, 1), run.began_at + seconds
        last_s = seconds - self._seconds(run, run.num_steps - 1)
        stopped = []
        for item in run.batch.items:
            if not item.samples:
                continue
            record = self._records[item.request_id]
            if record.num_tokens == 0:
                record.cached_len = self.executor.sequences[item.request_id].cached_len or 0
                self._on_start(record, run.began_at - record.arrival.arrived_at)
            self._recorder.tokens(record, run.num_steps, first_at, last_s, last_at)
            if record.num_tokens >= record.arrival.output_len < record.arrival.max_new_tokens:
                stopped.append(item.request_id)
        self._use(run, seconds)
        return bool(self.executor.commit(run.batch, stopped, duration_s=seconds, num_steps=run.num_steps))

    def _use(self, run: _Run, seconds: float) -> None:
        usage, num_steps, num_seqs = self._usage, run.num_steps, len(run.batch.items)
        usage.num_steps += num_steps
        usage.num_sequence_steps += num_steps * num_seqs
        usage.busy_s += seconds
        usage.num_prompt_tokens += run.prefill_tokens
        used = self.used_tokens
        usage.token_steps += num_steps * (used + run.decode_seqs * (num_steps - 1) / 2)
        usage.peak_tokens = max(usage.peak_tokens, used)

    def _block_hashes(self, request_id: str, num_blocks: int) -> list[int]:
        """The block names of the request's prompt, then names of its output blocks."""
        hashes = self._hashes[request_id]
        while len(hashes) < num_blocks:
            hashes.append(next(self._own_names))
        return hashes
