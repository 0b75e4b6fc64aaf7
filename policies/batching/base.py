"""Static batches in the central queue, from which idle workers pull (Magnus III-A, Multi-Bin section 3).

A batcher forms batches of jobs; an idle worker pulls one and runs it to its end. Two parts combine freely: the rule
that forms batches (``FcfsBatches``, ``WmaBatcher``, ``MultiBinBatcher``) and the choice of the next formed batch
(``first_arrived``, ``first_sealed``, ``policies.batching.hrrn.HighestResponseRatio``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from sortedcontainers import SortedDict

from farsight.core.decisions import Facts
from farsight.core.errors import IntegrityError
from farsight.core.forecast import Forecast
from farsight.policies.interfaces import Job
from farsight.policies.parts import Parts
from farsight.policies.settings import BatchSettings


def predicted_len(job: Job) -> int:
    """Returns the predicted remaining output tokens: the forecast's mean, rounded up, within [1, limit].

    Without a forecast the limit counts. Tokens generated earlier, in a batch that broke off, are subtracted.
    """
    total = job.max_new_tokens if job.forecast is None else math.ceil(min(job.forecast.mean, job.max_new_tokens))
    return max(1, total - job.output_len)


_NOT_URGENT = (math.inf, math.inf)


class FormedBatch:
    """Jobs that a worker runs together, padded to the longest, until the last one ends.

    The lengths date from the time a job was added; ``refresh`` takes over the length that a later forecast gives.

    Attributes:
        batch_id: Unique within its batcher, rising in order of creation.
        created_at: Instant of its creation; halves of a split batch keep the instant of the whole.
        sealed_at: Instant when it was sealed, at the latest when it was pulled; None while jobs may be added.
        jobs: In order of addition.
        prompt_lens: L(p) of each job: tokens that its prefill computes.
        predicted_lens: G(p), the predicted output length of each job.
        prompt_len: L(B), the longest prompt; every other is padded to it.
        predicted_len: G(B), the longest predicted output: the iterations of the batch.
        urgency: Urgency of its most urgent job, so that no job waits behind a less urgent batch.
        arrived_at: Arrival of its earliest job; the queueing time of the batch counts from here (Magnus III-E).
        is_part: Whether it is the rest of a batch that broke off.
    """

    __slots__ = (
        "arrived_at",
        "batch_id",
        "created_at",
        "is_part",
        "jobs",
        "predicted_len",
        "predicted_lens",
        "prompt_len",
        "prompt_lens",
        "sealed_at",
        "urgency",
    )

    def __init__(
        self, batch_id: int, created_at: float, sealed_at: float | None = None, *, is_part: bool = False
    ) -> None:
        self.batch_id = batch_id
        self.is_part = is_part
        self.created_at = created_at
        self.sealed_at = sealed_at
        self.jobs: list[Job] = []
        self.prompt_lens: list[int] = []
        self.predicted_lens: list[int] = []
        self.prompt_len = 0
        self.predicted_len = 0
        self.urgency: tuple[float, float] = _NOT_URGENT
        self.arrived_at = math.inf

    @property
    def insertable(self) -> bool:
        return self.sealed_at is None

    def insert(self, job: Job) -> None:
        """Adds one job. O(1)."""
        self.jobs.append(job)
        self.prompt_lens.append(job.known_len)
        self.predicted_lens.append(predicted_len(job))
        self.prompt_len = max(self.prompt_len, self.prompt_lens[-1])
        self.predicted_len = max(self.predicted_len, self.predicted_lens[-1])
        self.urgency = min(self.urgency, job.urgency)
        self.arrived_at = min(self.arrived_at, job.arrived_at)

    def drop(self, request_id: str) -> bool:
        """Removes a job that was aborted or has ended; returns False if the job is not in the batch. O(batch)."""
        for index, job in enumerate(self.jobs):
            if job.request_id == request_id:
                del self.jobs[index], self.prompt_lens[index], self.predicted_lens[index]
                self.prompt_len, self.predicted_len, self.urgency, self.arrived_at = self._summary()
                return True
        return False

    def refresh(self, job: Job) -> None:
        """Takes over the predicted length of one of the batch's jobs after its forecast has come. O(batch)."""
        self.predicted_lens[self.jobs.index(job)] = predicted_len(job)
        self.predicted_len = max(self.predicted_lens)

    def _summary(self) -> tuple[int, int, tuple[float, float], float]:
        return (
            max(self.prompt_lens, default=0),
            max(self.predicted_lens, default=0),
            min((job.urgency for job in self.jobs), default=_NOT_URGENT),
            min((job.arrived_at for job in self.jobs), default=math.inf),
        )

    def __len__(self) -> int:
        return len(self.jobs)

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` unless the lengths and keys are those of the jobs."""
        if (self.prompt_len, self.predicted_len, self.urgency, self.arrived_at) != self._summary():
            raise IntegrityError(f"batch {self.batch_id}: lengths or keys differ from those of its jobs")
        if not len(self.jobs) == len(self.prompt_lens) == len(self.predicted_lens):
            raise IntegrityError(f"batch {self.batch_id}: {len(self.jobs)} jobs, but not as many lengths")


ChooseBatch = Callable[[Sequence[FormedBatch], float], FormedBatch]
"""(batches of one urgency in order of addition, never empty; now) -> the batch to run next."""


def first_arrived(batches: Sequence[FormedBatch], now: float) -> FormedBatch:
    """Returns the batch with the earliest job; ties go to the batch formed first (vanilla scheduling, GLP, ABP)."""
    return min(batches, key=lambda batch: (batch.arrived_at, batch.batch_id))


def first_sealed(batches: Sequence[FormedBatch], now: float) -> FormedBatch:
    """Returns the batch that was completed first (Multi-Bin section 3); halves keep the instant of the whole."""
    return min(batches, key=lambda batch: now if batch.sealed_at is None else batch.sealed_at)


_Standing = tuple[tuple[float, float], tuple[float, ...], int]
"""(urgency, key of the choice, number of the addition): the least is chosen."""

_STANDING: dict[ChooseBatch, Callable[[FormedBatch], tuple[float, ...]]] = {
    first_arrived: lambda batch: (batch.arrived_at, batch.batch_id),
    first_sealed: lambda batch: (math.inf if batch.sealed_at is None else batch.sealed_at,),
}
"""The choices that do not depend on time, and their keys."""


class BatchPolicy(ABC):
    """Forms batches and hands them to idle workers. Not preemptive: a worker keeps a pulled batch."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """The number of jobs that no worker has pulled."""

    @abstractmethod
    def add(self, job: Job, now: float) -> None:
        """Adds a job that has arrived or whose worker has died; it must not be in the queue yet."""

    @abstractmethod
    def remove(self, request_id: str) -> None:
        """Removes an aborted job from the queue; unknown ids are ignored."""

    def foresee(self, made: Sequence[tuple[Job, Forecast]], now: float) -> None:
        """Gives waiting jobs their forecasts and adds the jobs again by these, as if they had arrived now."""
        for job, _ in made:
            self.remove(job.request_id)
        for job, forecast in made:
            job.forecast = forecast
            self.add(job, now)

    @abstractmethod
    def pull(self, now: float) -> FormedBatch | None:
        """Returns the next batch for an idle worker, from the most urgent ones; None if none is ready."""

    def company(self, batch: FormedBatch, jobs: Iterable[Job]) -> list[Job]:
        """Returns which of these jobs, not in the queue, join a pulled batch that has not begun, and make it no longer.

        The rule that formed the batch decides.

        Args:
            jobs: Among equal jobs the earlier ones join first.
        """
        return []

    @abstractmethod
    def restore(self, batch: FormedBatch) -> None:
        """Requeues the rest of a pulled batch that ran out of memory and is now small enough, without a split."""

    @abstractmethod
    def split(self, batch: FormedBatch, now: float) -> Job | None:
        """Splits a pulled batch that ran out of memory (Magnus III-C): its halves wait again and accept no more jobs.

        The caller has already removed jobs that have ended or were aborted; at least one is left.

        Returns:
            The job of a batch of one, which has failed because it fits nowhere; None after a split.
        """

    def hold(self, memory_tokens: float, now: float) -> None:
        """Sets the KV capacity of a worker, in tokens."""

    def story(self, batch: FormedBatch, now: float) -> Facts:
        """Returns why the pulled batch holds its jobs and why its turn has come; empty if there is no more to tell."""
        return {}

    def timed(self) -> Iterable[FormedBatch]:
        """Returns the batches whose times the choice may ask for at the next ``pull``; none if it asks for none."""
        return ()

    def next_due_at(self) -> float | None:
        """Returns when ``pull`` will have a batch without any arrival or removal; None if only such an event helps."""
        return None

    def flush(self, now: float) -> None:
        """Makes all partial batches ready, because no more jobs will come (a drain, the end of a trace)."""

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` if the bookkeeping contradicts itself."""


class BatchQueue:
    """The formed batches of a batcher, which a worker may pull, and the batch of each job.

    Args:
        choose: ``peek`` costs O(log batches) with ``first_arrived`` and ``first_sealed``, with any other O(batches).
    """

    def __init__(self, choose: ChooseBatch) -> None:
        self._choose = choose
        self._by = _STANDING.get(choose)
        self._ids = count()
        self._numbers = count()
        self._batches: dict[int, FormedBatch] = {}
        self._batch_of: dict[str, FormedBatch] = {}
        self._standings: dict[int, _Standing] = {}
        self._in_order: SortedDict[_Standing, FormedBatch] = SortedDict()

    @property
    def num_jobs(self) -> int:
        return len(self._batch_of)

    @property
    def num_batches(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[FormedBatch]:
        """Yields the batches in order of addition."""
        return iter(self._batches.values())

    def new_batch(self, now: float, sealed_at: float | None = None) -> FormedBatch:
        """Creates an empty batch with the next id, outside the queue."""
        return FormedBatch(next(self._ids), now, sealed_at)

    def put(self, batch: FormedBatch) -> None:
        """Makes a batch available. O(batch)."""
        self._batches[batch.batch_id] = batch
        self._stand(batch, next(self._numbers))
        for job in batch.jobs:
            self._batch_of[job.request_id] = batch

    def insert(self, batch: FormedBatch, job: Job) -> None:
        """Adds a job to a batch of this queue. O(1)."""
        batch.insert(job)
        self._batch_of[job.request_id] = batch
        self._stand(batch, self._leave(batch))

    def remove(self, request_id: str) -> FormedBatch | None:
        """Removes a job, and its batch if it is then empty. O(batch).

        Returns:
            Its batch; None for an unknown id.
        """
        batch = self._batch_of.pop(request_id, None)
        if batch is not None:
            batch.drop(request_id)
            number = self._leave(batch)
            if batch.jobs:
                self._stand(batch, number)
            else:
                del self._batches[batch.batch_id]
        return batch

    def batch_of(self, request_id: str) -> FormedBatch | None:
        """Returns the batch of a job; None for an unknown id."""
        return self._batch_of.get(request_id)

    def peek(self, now: float) -> FormedBatch | None:
        """Returns the chosen batch among the most urgent ones, without removing it."""
        if not self._batches:
            return None
        if self._by is not None:
            return self._in_order.peekitem(0)[1]
        urgency = min(batch.urgency for batch in self)
        return self._choose([batch for batch in self if batch.urgency == urgency], now)

    def pull(self, now: float) -> FormedBatch | None:
        """Removes and returns the chosen batch, if there is one."""
        batch = self.peek(now)
        if batch is not None:
            self.take(batch, now)
        return batch

    def take(self, batch: FormedBatch, now: float) -> None:
        """Removes a batch from this queue and seals it. O(batch)."""
        del self._batches[batch.batch_id]
        self._leave(batch)
        for job in batch.jobs:
            del self._batch_of[job.request_id]
        if batch.sealed_at is None:
            batch.sealed_at = now

    def split(self, batch: FormedBatch) -> Job | None:
        """Adds the two sealed halves of a pulled batch, the larger first; see ``BatchPolicy.split``."""
        if len(batch) == 1:
            return batch.jobs[0]
        middle = (len(batch) + 1) // 2
        for jobs in (batch.jobs[:middle], batch.jobs[middle:]):
            self._put_part(batch, jobs)
        return None

    def restore(self, batch: FormedBatch) -> None:
        """Adds a pulled batch again, with the present lengths of its jobs."""
        self._put_part(batch, batch.jobs)

    def _put_part(self, batch: FormedBatch, jobs: Sequence[Job]) -> None:
        part = FormedBatch(next(self._ids), batch.created_at, batch.sealed_at, is_part=True)
        for job in jobs:
            part.insert(job)
        self.put(part)

    def _stand(self, batch: FormedBatch, number: int) -> None:
        """Inserts the batch into the sorted order, if the choice does not depend on time."""
        if self._by is not None:
            standing = self._standings[batch.batch_id] = batch.urgency, self._by(batch), number
            self._in_order[standing] = batch

    def _leave(self, batch: FormedBatch) -> int:
        """Removes the batch from the sorted order; returns its number."""
        if self._by is None:
            return 0
        standing = self._standings.pop(batch.batch_id)
        del self._in_order[standing]
        return standing[2]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every batch is non-empty and in order, and every job is in exactly its batch."""
        for batch in self:
            batch.check_integrity()
            if not batch.jobs:
                raise IntegrityError(f"batch {batch.batch_id} is empty")
            for job in batch.jobs:
                if self._batch_of.get(job.request_id) is not batch:
                    raise IntegrityError(f"job {job.request_id} is in batch {batch.batch_id}, but not known to be")
        if len(self._batch_of) != sum(map(len, self)):
            raise IntegrityError(f"{len(self._batch_of)} jobs are known, {sum(map(len, self))} are in batches")
        by = self._by
        if by is not None:
            standing = {
                (batch.urgency, by(batch), self._standings[batch_id][2]): batch
                for batch_id, batch in self._batches.items()
            }
            if standing != dict(self._in_order):
                raise IntegrityError("batches do not stand in the order that they should")


@dataclass(frozen=True, slots=True)
class BatchContext:
    """The context that a batcher is built from.

    Attributes:
        size: Most jobs of a batch; None if memory alone limits it.
    """

    settings: BatchSettings
    size: int | None


BATCHERS: Parts[BatchPolicy, BatchContext] = Parts("scheduler.preset")
"""Batchers by name; presets of batch mode name one in the order column."""
