"""Batches with little wasted memory access: the adaptive batcher of Magnus (III-C, Algorithm 1).

A static batch pads every prompt to the longest, L(B), and runs until its last request ends, for G(B) iterations. Memory
access dominates the cost of decoding, so the waste of request p, with prompt L(p) and G(p) output tokens, is counted in
tokens whose KV is read without use::

    (2)  WMA_gen(p)  = G(p) (L(B) - L(p))                     padding, in each iteration that p needs
    (3)  WMA_wait(p) = sum over g in [G(p), G(B)) of (L(B) + g)   all of its row, in each iteration that it waits
    (4)  WMA(B)      = max over p of (WMA_gen(p) + WMA_wait(p))
    (5)  MEM(B)      = |B| (L(B) + G(B)) Delta

The sum of (2) and (3) is H(L(B), G(B)) - H(L(p), G(p)) with H(L, G) = L G + G (G - 1) / 2: the reads of a row of the
batch minus the reads of p alone. So (4) needs only L(B), G(B) and the least H(L(p), G(p)) of the batch, and adding a
job is priced in O(1), whatever the batch holds.

Jobs of different priority and deadline share batches. A batch has the urgency of its most urgent job, so no job starts
later because of the others in its batch, and the threshold bounds the run time that they add.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from farsight.core.decisions import Facts
from farsight.core.errors import IntegrityError, InvalidValueError
from farsight.policies.batching.base import (
    BATCHERS,
    BatchContext,
    BatchPolicy,
    BatchQueue,
    ChooseBatch,
    FormedBatch,
    first_arrived,
    predicted_len,
)
from farsight.policies.batching.hrrn import HighestResponseRatio
from farsight.policies.interfaces import Job

IntArray = NDArray[np.int64]
Lengths = TypeVar("Lengths", int, IntArray)


STORY_LOOK = 8
"""Most waiting requests that an explanation compares a batch with."""


def wasted_memory_accesses(batch: FormedBatch) -> int:
    """Returns WMA(B) of eq. (4), in tokens; 0 for one job. O(batch)."""
    return _reads(batch.prompt_len, batch.predicted_len) - _least_reads(batch)


def memory_tokens(batch: FormedBatch) -> int:
    """Returns MEM(B) / Delta of eq. (5), in tokens: the padded batch at its longest."""
    return len(batch) * (batch.prompt_len + batch.predicted_len)


class WmaBatcher(BatchPolicy):
    """Adds each job to the batch where it wastes least, or to a new batch.

    ``add`` and ``remove`` cost O(open batches), vectorised; ``pull`` O(batches) plus the cost of ``choose``.

    Args:
        memory_tokens: Theta / Delta, most KV tokens of a batch at its longest, eq. (5). A job that alone exceeds it
        still gets a batch of its own.
        choose: Chooses the batch for an idle worker: HRRN in Magnus, ``first_arrived`` in its ablations.
        wma_threshold: Phi, tokens; a job joins a batch only if the WMA with it is strictly below.
        max_batch_size: Most jobs of a batch (the ablation GLP); None for no bound.
    """

    def __init__(
        self,
        memory_tokens: float,
        choose: ChooseBatch,
        wma_threshold: float = 50_000,
        max_batch_size: int | None = None,
    ) -> None:
        if not memory_tokens > 0:
            raise InvalidValueError("memory_tokens", memory_tokens, "a number of tokens above 0")
        if not wma_threshold >= 0:
            raise InvalidValueError("wma_threshold", wma_threshold, "0 or more")
        if max_batch_size is not None and max_batch_size < 1:
            raise InvalidValueError("max_batch_size", max_batch_size, "1 or more, or None")
        self.memory_tokens = memory_tokens
        self.wma_threshold = wma_threshold
        self.max_batch_size = max_batch_size
        self._choose = choose
        self._queue = BatchQueue(choose)
        self._open = _OpenBatches()

    @property
    def num_waiting(self) -> int:
        return self._queue.num_jobs

    def add(self, job: Job, now: float) -> None:
        """Adds the job to the first batch of least WMA with room (Algorithm 1); to a new one if WMA is Phi or more."""
        index = self._best(job)
        if index is None:
            batch = self._queue.new_batch(now)
            batch.insert(job)
            self._queue.put(batch)
            self._open.append(batch)
        else:
            self._queue.insert(self._open.batches[index], job)
            self._open.update(index)

    def remove(self, request_id: str) -> None:
        batch = self._queue.remove(request_id)
        if batch is not None and batch.insertable:
            index = self._open.index(batch)
            if batch.jobs:
                self._open.update(index)
            else:
                self._open.delete(index)

    def timed(self) -> Iterable[FormedBatch]:
        return self._queue

    def pull(self, now: float) -> FormedBatch | None:
        batch = self._queue.peek(now)
        if batch is not None:
            if batch.insertable:
                self._open.delete(self._open.index(batch))
            self._queue.take(batch, now)
        return batch

    def company(self, batch: FormedBatch, jobs: Iterable[Job]) -> list[Job]:
        """Returns the jobs that waste least, as many as memory holds."""
        longest = _reads(batch.prompt_len, batch.predicted_len)
        room = int(self.memory_tokens // max(1, batch.prompt_len + batch.predicted_len))
        room = room if self.max_batch_size is None else min(room, self.max_batch_size)
        fitting = [job for job in jobs if self._joins(batch, job, longest)]
        fitting.sort(key=lambda job: -_reads(job.known_len, predicted_len(job)))
        return fitting[: max(0, room - len(batch))]

    def _joins(self, batch: FormedBatch, job: Job, longest: int) -> bool:
        prompt_len, output_len = job.known_len, predicted_len(job)
        is_no_longer = prompt_len <= batch.prompt_len and output_len <= batch.predicted_len
        return is_no_longer and longest - _reads(prompt_len, output_len) < self.wma_threshold

    def story(self, batch: FormedBatch, now: float) -> Facts:
        """Returns WMA against Phi, the waiting request that would waste least beside these, and the ratios compared.

        At most ``STORY_LOOK`` waiting requests are looked at.
        """
        least = _least_reads(batch)
        facts: dict[str, float | str] = {
            "waste_tokens": _reads(batch.prompt_len, batch.predicted_len) - least,
            "waste_limit_tokens": self.wma_threshold,
            "memory_tokens": memory_tokens(batch),
        }
        if math.isfinite(self.memory_tokens):  # else no worker has reported its capacity yet
            facts["memory_limit_tokens"] = self.memory_tokens
        waiting = itertools.islice((job for other in self._queue for job in other.jobs), STORY_LOOK)
        nearest = min((_with(batch, least, job) for job in waiting), default=None)
        if nearest is not None:
            facts["next_waste_tokens"], facts["next_memory_tokens"] = nearest
        if isinstance(self._choose, HighestResponseRatio):
            facts.update(self._choose.story(batch, self._queue, now))
            facts["num_rivals"] = self._queue.num_batches
        return facts

    def restore(self, batch: FormedBatch) -> None:
        self._queue.restore(batch)

    def split(self, batch: FormedBatch, now: float) -> Job | None:
        return self._queue.split(batch)

    def hold(self, memory_tokens: float, now: float) -> None:
        """Sets the KV capacity in tokens; moves the latest jobs of batches that no longer fit to other batches."""
        fewer, self.memory_tokens = memory_tokens < self.memory_tokens, memory_tokens
        if not fewer:
            return
        for batch in list(self._open.batches):
            moved: list[Job] = []
            while len(batch) > 1 and not self._allows(batch):
                moved.append(batch.jobs[-1])
                self.remove(moved[-1].request_id)
            for job in reversed(moved):
                self.add(job, now)

    def check_integrity(self) -> None:
        self._queue.check_integrity()
        self._open.check_integrity()
        if self._open.batches != [batch for batch in self._queue if batch.insertable]:
            raise IntegrityError("the open batches are not the insertable ones of the queue")
        for batch in self._open.batches:
            if len(batch) > 1 and not self._allows(batch):
                raise IntegrityError(f"batch {batch.batch_id} breaks the bounds")

    def _best(self, job: Job) -> int | None:
        if not self._open.batches:
            return None
        prompt_len, output_len = job.known_len, predicted_len(job)
        sizes, prompt_lens, output_lens, least_reads = self._open.shapes
        prompt_lens = np.maximum(prompt_lens, prompt_len)
        output_lens = np.maximum(output_lens, output_len)
        waste = _reads(prompt_lens, output_lens) - np.minimum(least_reads, _reads(prompt_len, output_len))
        fits = (sizes + 1) * (prompt_lens + output_lens) <= self.memory_tokens
        if self.max_batch_size is not None:
            fits &= sizes < self.max_batch_size
        waste = np.where(fits, waste, np.iinfo(np.int64).max)
        index = int(waste.argmin())
        return index if fits[index] and waste[index] < self.wma_threshold else None

    def _allows(self, batch: FormedBatch) -> bool:
        return (
            memory_tokens(batch) <= self.memory_tokens
            and wasted_memory_accesses(batch) < self.wma_threshold
            and (self.max_batch_size is None or len(batch) <= self.max_batch_size)
        )


def _with(batch: FormedBatch, least_reads: int, job: Job) -> tuple[int, int]:
    """Returns WMA and memory of the batch if it held this job as well, both in tokens. O(1)."""
    prompt_len, output_len = job.known_len, predicted_len(job)
    longest_prompt, longest_output = max(batch.prompt_len, prompt_len), max(batch.predicted_len, output_len)
    waste = _reads(longest_prompt, longest_output) - min(least_reads, _reads(prompt_len, output_len))
    return waste, (len(batch) + 1) * (longest_prompt + longest_output)


class _OpenBatches:
    """The insertable batches in order of creation, and beside them a column of numbers for each.

    Rows of ``shapes``: |B|, L(B), G(B), least H(L(p), G(p)).
    """

    def __init__(self) -> None:
        self.batches: list[FormedBatch] = []
        self._columns: IntArray = np.zeros((4, 64), np.int64)

    @property
    def shapes(self) -> IntArray:
        return self._columns[:, : len(self.batches)]

    def index(self, batch: FormedBatch) -> int:
        return bisect_left(self.batches, batch.batch_id, key=lambda each: each.batch_id)

    def append(self, batch: FormedBatch) -> None:
        if len(self.batches) == self._columns.shape[1]:
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
        self.batches.append(batch)
        self.update(len(self.batches) - 1)

    def update(self, index: int) -> None:
        self._columns[:, index] = _shape(self.batches[index])

    def delete(self, index: int) -> None:
        del self.batches[index]
        end = len(self.batches)
        self._columns[:, index:end] = self._columns[:, index + 1 : end + 1]

    def check_integrity(self) -> None:
        for index, batch in enumerate(self.batches):
            if tuple(self.shapes[:, index]) != _shape(batch):
                raise IntegrityError(f"batch {batch.batch_id}: its column differs from its jobs")


def _shape(batch: FormedBatch) -> tuple[int, int, int, int]:
    return len(batch), batch.prompt_len, batch.predicted_len, _least_reads(batch)


def _least_reads(batch: FormedBatch) -> int:
    return min(map(_reads, batch.prompt_lens, batch.predicted_lens))


def _reads(prompt_len: Lengths, output_len: Lengths) -> Lengths:
    """Returns H(L, G): tokens whose KV is read in G iterations after a prompt of L, new tokens included."""
    return prompt_len * output_len + output_len * (output_len - 1) // 2


@BATCHERS.register("wma-hrrn", reads_forecasts=True)
def build_wma_hrrn(context: BatchContext) -> WmaBatcher:
    """Forms batches of least wasted memory access; the highest response ratio runs next."""
    settings = context.settings
    choose = HighestResponseRatio(settings.serving_time_s)
    return WmaBatcher(settings.memory_tokens, choose, settings.batch.wma_threshold, context.size)


@BATCHERS.register("wma-fcfs", reads_forecasts=True)
def build_wma_fcfs(context: BatchContext) -> WmaBatcher:
    """Forms batches of least wasted memory access; the batch that arrived first runs next."""
    settings = context.settings
    return WmaBatcher(settings.memory_tokens, first_arrived, settings.batch.wma_threshold, context.size)
