"""Batch mode: idle workers pull formed batches from one central queue and run each to its end."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from core.costs import attention_pairs
from policies.batching.base import Batcher, FormedBatch
from policies.job import Job
from simulator.cluster.latency import LatencyModel
from simulator.cluster.records import Record, Recorder, Usage
from simulator.traffic.workload import Arrival


@dataclass(frozen=True, slots=True)
class BatchRun:
    """What running a batch comes to.

    Attributes:
        seconds: Until the worker is idle again, or until it runs out of memory.
        ends_s: When each job is returned, seconds from the start; empty if the batch broke off.
        num_tokens: Output tokens computed, invalid ones included.
        num_steps: Forward passes.
    """

    seconds: float
    ends_s: tuple[float, ...]
    num_tokens: int
    num_steps: int


class Execution(Protocol):
    """How a worker runs a batch."""

    def run(self, prompt_lens: list[int], output_lens: list[int]) -> BatchRun: ...


@dataclass(frozen=True, slots=True)
class StaticExecution:
    """Padded: every prompt counts as the longest, everybody computes until the last one ends (what Magnus measures).

    Attributes:
        capacity: KV tokens; a batch that needs more breaks off at the step that does not fit.
    """

    latency: LatencyModel
    capacity: float = math.inf

    def run(self, prompt_lens: list[int], output_lens: list[int]) -> BatchRun:
        size, prompt, longest = len(prompt_lens), max(prompt_lens), max(output_lens)
        fits = longest if size * (prompt + longest) <= self.capacity else int(self.capacity // size) - prompt
        steps = max(0, min(longest, fits))
        pairs = size * attention_pairs(prompt, 0)
        seconds = self.latency.step_s(size * prompt, 0, 0, pairs) if steps else 0.0
        if steps > 1:
            seconds += self.latency.decode_run_s(size, size * (prompt + 1), steps - 1)
        ends = (seconds,) * size if steps == longest else ()
        return BatchRun(seconds, ends, size * steps, steps)


@dataclass(frozen=True, slots=True)
class RaggedExecution:
    """No padding: each job computes its own tokens and is returned when it ends."""

    latency: LatencyModel
    capacity: float = math.inf

    def run(self, prompt_lens: list[int], output_lens: list[int]) -> BatchRun:
        context, pairs = sum(prompt_lens), sum(attention_pairs(num, 0) for num in prompt_lens)
        seconds = self.latency.step_s(context, 0, 0, pairs)
        ends = [0.0] * len(prompt_lens)
        computed, done = len(prompt_lens), 1
        by_len = sorted(range(len(output_lens)), key=output_lens.__getitem__)
        for rank, index in enumerate(by_len):
            alive = len(by_len) - rank
            fits = math.inf if self.capacity == math.inf else (self.capacity - context) // alive
            steps = int(min(output_lens[index], fits)) - done
            if steps > 0:
                seconds += self.latency.decode_run_s(alive, context + alive * done, steps)
                computed += alive * steps
                done += steps
            if done < output_lens[index]:
                return BatchRun(seconds, (), computed, done)
            ends[index] = seconds
            context -= prompt_lens[index]
        return BatchRun(seconds, tuple(ends), computed, done)


@dataclass(slots=True)
class _Running:
    """A batch in a worker; afterwards, if it broke off, the reload."""

    worker: int
    batch: FormedBatch | None
    run: BatchRun
    began_at: float


@dataclass(slots=True)
class BatchCounts:
    """What only batch mode has.

    Attributes:
        sizes: Of the batches that ended, in order.
        num_tokens: Output tokens computed, invalid ones included.
        num_splits: Batches that ran out of memory.
    """

    sizes: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_splits: int = 0


class BatchFleet:
    """Workers of batch mode under virtual time.

    Args:
        reload_s: After running out of memory a worker empties it and loads the model again (Magnus section III-C).
        on_run: Told of each batch that ended with its true lengths and seconds: what estimators learn from.
    """

    def __init__(
        self,
        batcher: Batcher,
        execution: Execution,
        num_workers: int = 1,
        *,
        reload_s: float = 0.0,
        on_run: Callable[[list[int], list[int], float], None] | None = None,
    ) -> None:
        self.batcher = batcher
        self.recorder = Recorder()
        self.counts = BatchCounts()
        self.failed: list[str] = []
        self._execution = execution
        self._reload_s = reload_s
        self._on_run = on_run
        self._idle = list(range(num_workers - 1, -1, -1))
        self._busy: list[tuple[float, int, _Running]] = []
        self._num_pulled = 0
        self._records: dict[str, Record] = {}
        for worker in range(num_workers):
            self.recorder.usage[str(worker)] = Usage()

    def run(self, arrivals: Iterable[Arrival]) -> Recorder:
        """All of them, to the end; what waits for company goes alone once nobody else will come."""
        source = iter(arrivals)
        arrival = next(source, None)
        now = 0.0
        while True:
            arrives_at = math.inf if arrival is None else arrival.arrived_at
            ends_at = self._busy[0][0] if self._busy else math.inf
            due_at = self.batcher.next_due_at() if self._idle else None
            at = min(arrives_at, ends_at, math.inf if due_at is None else max(due_at, now))
            if at == math.inf:
                if not self.batcher.num_waiting:
                    return self.recorder
                self.batcher.flush(now)
            else:
                now = at
            while arrival is not None and arrival.arrived_at <= now:
                self._add(arrival)
                arrival = next(source, None)
            while self._busy and self._busy[0][0] <= now:
                self._end(heapq.heappop(self._busy)[2], now)
            self._pull(now)

    def _add(self, arrival: Arrival) -> None:
        job = Job(
            arrival.request_id,
            arrival.arrived_at,
            arrival.prompt_len,
            arrival.max_new_tokens,
            priority=arrival.priority,
            forecast=arrival.forecast,
        )
        if arrival.deadline_s is not None:
            job.deadline_at = arrival.arrived_at + arrival.deadline_s
        self._records[arrival.request_id] = Record(arrival)
        self.batcher.add(job, arrival.arrived_at)

    def _pull(self, now: float) -> None:
        while self._idle and (batch := self.batcher.pull(now)) is not None:
            run = self._execution.run([job.prompt_len for job in batch.jobs], self._output_lens(batch))
            self._occupy(_Running(self._idle.pop(), batch, run, now), now + run.seconds)

    def _occupy(self, running: _Running, until: float) -> None:
        self._num_pulled += 1
        heapq.heappush(self._busy, (until, self._num_pulled, running))

    def _output_lens(self, batch: FormedBatch) -> list[int]:
        return [self._records[job.request_id].arrival.output_len for job in batch.jobs]

    def _end(self, running: _Running, now: float) -> None:
        usage, run, batch = self.recorder.usage[str(running.worker)], running.run, running.batch
        if batch is None:
            self._idle.append(running.worker)
            return
        usage.num_steps += run.num_steps
        usage.num_sequence_steps += run.num_tokens
        usage.busy_s += run.seconds
        self.counts.num_tokens += run.num_tokens
        if run.ends_s:
            self._idle.append(running.worker)
            self._finish(running, batch)
        else:
            self._break_off(batch, now)
            running.batch = None
            self._occupy(running, now + self._reload_s)

    def _break_off(self, batch: FormedBatch, now: float) -> None:
        """Its memory is emptied, its halves wait again; a single job that does not fit has failed."""
        self.counts.num_splits += 1
        for job in batch.jobs:
            self._records[job.request_id].num_evictions += 1
        failed = self.batcher.split(batch, now)
        if failed is not None:
            self.failed.append(failed.request_id)
            del self._records[failed.request_id]

    def _finish(self, running: _Running, batch: FormedBatch) -> None:
        self.counts.sizes.append(len(batch))
        if self._on_run is not None:
            self._on_run([job.prompt_len for job in batch.jobs], self._output_lens(batch), running.run.seconds)
        for job, end_s in zip(batch.jobs, running.run.ends_s, strict=True):
            record = self._records.pop(job.request_id)
            record.replica = str(running.worker)
            record.num_tokens = record.arrival.output_len
            record.first_token_at = record.last_token_at = record.finished_at = running.began_at + end_s
            self.recorder.done.append(record)
