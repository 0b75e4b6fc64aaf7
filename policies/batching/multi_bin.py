"""Multi-Bin batching: each batch holds requests of similar predicted length, from one bin (sections 3 and 4).

A request of predicted length l goes to the bin i with l_{i-1} <= l < l_i. A bin that holds B requests becomes a batch,
and batches are served in order of completion. With k bins a batch waits for the longest request of a k-th of the range
instead of the whole; the cost is the wait until a bin fills, see ``lab.reproduce.multi_bin_runs``.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from farsight.core.decisions import Facts
from farsight.core.errors import IntegrityError, InvalidValueError
from farsight.core.forecast import Forecast
from farsight.policies.batching.base import (
    BATCHERS,
    BatchContext,
    BatchPolicy,
    BatchQueue,
    FormedBatch,
    first_sealed,
    predicted_len,
)
from farsight.policies.interfaces import Job

MIN_LENGTHS = 100
"""Fewest lengths from which edges are learned; also the number of jobs between two updates of the edges."""

MAX_LENGTHS = 1000
"""Most lengths from which edges are learned: the latest ones."""


def equal_mass_edges(quantile: Callable[[float], float], num_bins: int) -> tuple[float, ...]:
    """Returns l_0 ... l_k at the levels i/k: bins of equal probability are optimal for uniform lengths (Lemma 4.1).

    Args:
        quantile: Length at a level in [0, 1], not falling.
    """
    _check_bins(num_bins)
    return tuple(quantile(index / num_bins) for index in range(num_bins + 1))


def sample_edges(lengths: Sequence[float], num_bins: int) -> tuple[float, ...]:
    """Returns equal-mass edges of observed lengths, with linear interpolation. Two equal edges leave a bin empty."""
    if not len(lengths):
        raise InvalidValueError("lengths", lengths, "one length or more")
    ordered = np.sort(np.asarray(lengths, float))
    return equal_mass_edges(lambda level: float(np.quantile(ordered, level)), num_bins)


def uniform_edges(low: float, high: float, num_bins: int) -> tuple[float, ...]:
    """Returns l_i = l_min + (i/k)(l_max - l_min), by Lemma 4.1, eq. (3)."""
    if not low <= high:
        raise InvalidValueError("high", high, f"{low} or more")
    return equal_mass_edges(lambda level: low + level * (high - low), num_bins)


def exponential_edges(rate: float, batch_size: int, num_bins: int) -> tuple[float, ...]:
    """Returns l_0 ... l_k for lengths of Exp(rate), by Lemma A.1; l_0 = 0, l_k = infinity.

    Between these, l_i = (1/rate) sum of ln L_{k-j} over j in [1, i]. The edges minimise a bound on the service time and
    hold less in the last bin than equal mass would.
    """
    if not rate > 0:
        raise InvalidValueError("rate", rate, "above 0")
    chain = log_chain(batch_size, num_bins)
    edges = [0.0]
    for length in reversed(chain[:-1]):
        edges.append(edges[-1] + math.log(length) / rate)
    return (*edges, math.inf)


def log_chain(batch_size: int, num_bins: int) -> tuple[float, ...]:
    """Returns L_1 ... L_k of Lemma A.1: L_1 = 1 + 1/2 + ... + 1/B (harmonic), L_m = 1 + ln L_{m-1}."""
    _check_bins(num_bins)
    if batch_size < 1:
        raise InvalidValueError("batch_size", batch_size, "1 or more")
    chain = [sum(1 / each for each in range(1, batch_size + 1))]
    while len(chain) < num_bins:
        chain.append(1 + math.log(chain[-1]))
    return tuple(chain)


class MultiBinBatcher(BatchPolicy):
    """Keeps one open batch per bin; a full batch is sealed and served in turn.

    The most urgent sealed batch goes first; a batch has the urgency of its most urgent job. Within a bin urgency has
    no effect, since all its jobs leave together.

    ``add`` costs O(log k), ``remove`` O(B), ``pull`` O(k + log of the sealed batches).

    Args:
        edges: l_0 ... l_k in tokens, not falling. A length below l_0 goes to the first bin, one from l_k on to the
            last.
        batch_size: B; a bin is sealed when it holds B jobs.
        max_wait_s: An idle worker may pull a bin with fewer than B jobs once its oldest job has waited this long since
        its arrival; the bin then has the turn of a batch completed at that instant, and takes jobs until it is pulled.
        Infinity as in the paper, where a rare length may wait without bound.
    """

    def __init__(self, edges: Sequence[float], batch_size: int, max_wait_s: float = math.inf) -> None:
        _check_edges(edges)
        if batch_size < 1:
            raise InvalidValueError("batch_size", batch_size, "1 or more")
        if not max_wait_s >= 0:
            raise InvalidValueError("max_wait_s", max_wait_s, "0 or more")
        self.edges = tuple(edges)
        self.batch_size = batch_size
        self.max_wait_s = max_wait_s
        self._inner = self.edges[1:-1]
        self._open: dict[int, FormedBatch] = {}
        self._bin_of: dict[str, int] = {}
        self._sealed = BatchQueue(first_sealed)

    @property
    def num_waiting(self) -> int:
        return len(self._bin_of) + self._sealed.num_jobs

    def bin_of(self, length: float) -> int:
        """Returns the bin of a predicted length, from 0."""
        return bisect_right(self._inner, length)

    def story(self, batch: FormedBatch, now: float) -> Facts:
        """Returns the bin that the batch comes from, and the size of a full batch."""
        index = self.bin_of(batch.predicted_len)
        edges = {"bin_from_tokens": self.edges[index], "bin_to_tokens": self.edges[index + 1]}
        finite = {name: edge for name, edge in edges.items() if math.isfinite(edge)}
        return {"bin": index + 1, "num_bins": len(self.edges) - 1, "full_size": self.batch_size, **finite}

    def add(self, job: Job, now: float) -> None:
        self._enter(job, now)

    def _enter(self, job: Job, now: float) -> None:
        index = self.bin_of(predicted_len(job))
        batch = self._open.get(index)
        if batch is None:
            batch = self._open[index] = self._sealed.new_batch(now)
        batch.insert(job)
        self._bin_of[job.request_id] = index
        if len(batch) == self.batch_size:
            self._seal(index, now)

    def remove(self, request_id: str) -> None:
        index = self._bin_of.pop(request_id, None)
        if index is None:
            self._sealed.remove(request_id)
            return
        batch = self._open[index]
        batch.drop(request_id)
        if not batch.jobs:
            del self._open[index]

    def foresee(self, made: Sequence[tuple[Job, Forecast]], now: float) -> None:
        """Moves jobs to the bins of their forecasts.

        A sealed batch that loses a job is no longer full: its other jobs wait in their bin again. The parts of a batch
        that broke off stay as they are.
        """
        moved: list[Job] = []
        for job, forecast in made:
            before = predicted_len(job)
            job.forecast = forecast
            batch, is_sealed = self._batch_of(job.request_id)
            if batch is None:  # its batch was taken apart for one of the others
                continue
            if batch.is_part or self.bin_of(before) == self.bin_of(predicted_len(job)):
                batch.refresh(job)
            elif is_sealed:
                self._sealed.take(batch, now)
                moved += batch.jobs
            else:
                self.remove(job.request_id)
                moved.append(job)
        for job in sorted(moved, key=lambda each: each.arrived_at):
            self._enter(job, now)

    def _batch_of(self, request_id: str) -> tuple[FormedBatch | None, bool]:
        """Returns the batch of a waiting job, and whether the batch is sealed."""
        index = self._bin_of.get(request_id)
        return (self._sealed.batch_of(request_id), True) if index is None else (self._open[index], False)

    def pull(self, now: float) -> FormedBatch | None:
        self._seal_due(now)
        return self._sealed.pull(now)

    def company(self, batch: FormedBatch, jobs: Iterable[Job]) -> list[Job]:
        """Returns jobs of the batch's bin, up to a full batch; the longest job tells which bin it was."""
        number = self.bin_of(batch.predicted_len)
        of_bin = (job for job in jobs if self.bin_of(predicted_len(job)) == number)
        return list(itertools.islice(of_bin, max(0, self.batch_size - len(batch))))

    def restore(self, batch: FormedBatch) -> None:
        self._sealed.restore(batch)

    def split(self, batch: FormedBatch, now: float) -> Job | None:
        return self._sealed.split(batch)

    def next_due_at(self) -> float | None:
        due_at = min((self._due_at(batch) for batch in self._open.values()), default=math.inf)
        return None if due_at == math.inf else due_at

    def flush(self, now: float) -> None:
        for index in sorted(self._open, key=lambda each: self._open[each].created_at):
            self._seal(index, now)

    def check_integrity(self) -> None:
        self._sealed.check_integrity()
        for index, batch in self._open.items():
            batch.check_integrity()
            if not 0 < len(batch) < self.batch_size or not batch.insertable:
                raise IntegrityError(f"bin {index} holds {len(batch)} jobs and was not sealed at {self.batch_size}")
            if any(self._bin_of.get(job.request_id) != index for job in batch.jobs):
                raise IntegrityError(f"bin {index} holds a job that is not known to be there")
        if len(self._bin_of) != sum(map(len, self._open.values())):
            raise IntegrityError(f"{len(self._bin_of)} jobs are known to be in bins that hold other numbers")
        if any(batch.insertable for batch in self._sealed):
            raise IntegrityError("a batch that is not sealed waits for a worker")

    def rebin(self, edges: Sequence[float], now: float) -> None:
        """Sets new edges and moves the jobs of unsealed batches to their new bins. O(jobs in bins)."""
        _check_edges(edges)
        jobs = [job for batch in self._open.values() for job in batch.jobs]
        self._open, self._bin_of = {}, {}
        self.edges, self._inner = tuple(edges), tuple(edges[1:-1])
        for job in sorted(jobs, key=lambda each: each.arrived_at):
            self._enter(job, now)

    def _due_at(self, batch: FormedBatch) -> float:
        return batch.arrived_at + self.max_wait_s

    def _seal_due(self, now: float) -> None:
        """Seals the first due bin if its turn comes before that of all sealed batches; other due bins go on filling."""
        open_bins = self._open.items()
        due = [(each.urgency, self._due_at(each), index) for index, each in open_bins if self._due_at(each) <= now]
        if not due:
            return
        urgency, due_at, index = min(due)
        head = self._sealed.peek(now)
        if head is None or head.sealed_at is None or (urgency, due_at) < (head.urgency, head.sealed_at):
            self._seal(index, now)

    def _seal(self, index: int, now: float) -> None:
        batch = self._open.pop(index)
        batch.sealed_at = min(now, self._due_at(batch))
        for job in batch.jobs:
            del self._bin_of[job.request_id]
        self._sealed.put(batch)


class LearnedBins(MultiBinBatcher):
    """Bins of equal mass over the latest predicted lengths; one bin until there are ``MIN_LENGTHS`` of them.

    Args:
        num_bins: k.
    """

    def __init__(self, num_bins: int, batch_size: int, max_wait_s: float = math.inf) -> None:
        _check_bins(num_bins)
        super().__init__((0.0, math.inf), batch_size, max_wait_s)
        self.num_bins = num_bins
        self._lengths: deque[float] = deque(maxlen=MAX_LENGTHS)
        self._num_unused = 0

    def add(self, job: Job, now: float) -> None:
        """Adds the job; recomputes the edges every ``MIN_LENGTHS`` jobs."""
        self._lengths.append(predicted_len(job))
        self._num_unused += 1
        if self._num_unused >= MIN_LENGTHS:
            self._num_unused = 0
            self.rebin(sample_edges(self._lengths, self.num_bins), now)
        super().add(job, now)

    def foresee(self, made: Sequence[tuple[Job, Forecast]], now: float) -> None:
        """Moves jobs as above; late forecasts replace the assumed lengths among the lengths that edges come from."""
        for job, _ in made:
            length = predicted_len(job)
            if length in self._lengths:
                self._lengths.remove(length)
        super().foresee(made, now)
        self._lengths.extend(predicted_len(job) for job, _ in made)


def _check_edges(edges: Sequence[float]) -> None:
    if len(edges) < 2 or not all(low <= high for low, high in itertools.pairwise(edges)):
        raise InvalidValueError("edges", tuple(edges), "two or more, not falling")


def _check_bins(num_bins: int) -> None:
    if num_bins < 1:
        raise InvalidValueError("num_bins", num_bins, "1 or more")


@BATCHERS.register("multi-bin", reads_forecasts=True)
def build_multi_bin(context: BatchContext) -> MultiBinBatcher:
    """Forms batches in bins of equal mass by predicted length; the batch that was completed first runs next."""
    edges, batch, size = context.settings.edges, context.settings.batch, context.size or 1
    if edges is None:
        return LearnedBins(batch.num_bins, size, batch.max_wait_s)
    return MultiBinBatcher(edges, size, batch.max_wait_s)
