"""Static batches: what waits in the central queue from which idle workers pull (Magnus III-A, Multi-Bin section 3).

A batcher forms batches of jobs; a worker that has become idle pulls one and runs it to its end. The parts compose: the
way batches are formed (``FcfsBatches``, ``WmaBatcher``, ``MultiBinBatcher``) and, for formed ones, the choice among
them (``first_arrived``, ``first_sealed``, ``policies.batching.hrrn.HighestResponseRatio``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from sortedcontainers import SortedDict

from core.errors import IntegrityError
from policies.job import Job
from policies.parts import Parts
from policies.settings import BatchSettings


def predicted_len(job: Job) -> int:
    """Output tokens still to come: the forecast's mean, rounded up, within [1, limit]; the limit without a forecast.

    Tokens generated before (a batch that broke off) are counted off, but one is always to come.
    """
    total = job.max_new_tokens if job.forecast is None else math.ceil(min(job.forecast.mean, job.max_new_tokens))
    return max(1, total - job.output_len)


_NOT_URGENT = (math.inf, math.inf)


class FormedBatch:
    """Jobs that a worker will run together, padded to the longest, until the last one ends.

    The lengths are those at the time a job was put in; later changes of the job do not move its batch.

    Attributes:
        batch_id: Unique within its batcher, rising in order of creation.
        created_at: When it was opened; halves keep that of the whole.
        sealed_at: When it was completed, at the latest when it was pulled; None while jobs may still be put in.
        jobs: In the order they were put in.
        prompt_lens: L(p) of each job: tokens that its prefill computes.
        predicted_lens: G(p) of each job as foreseen.
        prompt_len: L(B), the longest prompt; every other is padded to it.
        predicted_len: G(B), the most output tokens foreseen: iterations of the batch.
        urgency: Of the most urgent job; a job never makes those beside it wait behind less urgent batches.
        arrived_at: Of the job that came first; the queueing time of the batch counts from here (Magnus III-E).
    """

    __slots__ = (
        "arrived_at",
        "batch_id",
        "created_at",
        "jobs",
        "predicted_len",
        "predicted_lens",
        "prompt_len",
        "prompt_lens",
        "sealed_at",
        "urgency",
    )

    def __init__(self, batch_id: int, created_at: float, sealed_at: float | None = None) -> None:
        self.batch_id = batch_id
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
        """Puts one job in. O(1)."""
        self.jobs.append(job)
        self.prompt_lens.append(job.known_len)
        self.predicted_lens.append(predicted_len(job))
        self.prompt_len = max(self.prompt_len, self.prompt_lens[-1])
        self.predicted_len = max(self.predicted_len, self.predicted_lens[-1])
        self.urgency = min(self.urgency, job.urgency)
        self.arrived_at = min(self.arrived_at, job.arrived_at)

    def drop(self, request_id: str) -> bool:
        """Takes a job out (aborted, ended); False if it is not in here. O(batch)."""
        for index, job in enumerate(self.jobs):
            if job.request_id == request_id:
                del self.jobs[index], self.prompt_lens[index], self.predicted_lens[index]
                self.prompt_len, self.predicted_len, self.urgency, self.arrived_at = self._summary()
                return True
        return False

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
"""(batches of one urgency in the order they came in, never empty; now) -> the one to run next."""


def first_arrived(batches: Sequence[FormedBatch], now: float) -> FormedBatch:
    """The batch whose first job came first; of equals the one formed first (vanilla scheduling, GLP, ABP)."""
    return min(batches, key=lambda batch: (batch.arrived_at, batch.batch_id))


def first_sealed(batches: Sequence[FormedBatch], now: float) -> FormedBatch:
    """First completed batch, first served (Multi-Bin section 3); halves keep the instant of the whole."""
    return min(batches, key=lambda batch: now if batch.sealed_at is None else batch.sealed_at)


_Standing = tuple[tuple[float, float], tuple[float, ...], int]
"""(urgency, what the choice goes by, number of the putting in): the least is chosen."""

_STANDING: dict[ChooseBatch, Callable[[FormedBatch], tuple[float, ...]]] = {
    first_arrived: lambda batch: (batch.arrived_at, batch.batch_id),
    first_sealed: lambda batch: (math.inf if batch.sealed_at is None else batch.sealed_at,),
}
"""The choices that time does not change, and what they go by."""


class Batcher(ABC):
    """Forms batches and hands them to idle workers. Not preemptive: a pulled batch is the worker's own."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Jobs that no worker has taken."""

    @abstractmethod
    def add(self, job: Job, now: float) -> None:
        """A job has arrived, or its worker has died; it is not in the queue yet."""

    @abstractmethod
    def remove(self, request_id: str) -> None:
        """A waiting job is gone (aborted); unknown ids are fine."""

    @abstractmethod
    def pull(self, now: float) -> FormedBatch | None:
        """A worker is idle: the batch that it runs next, of the most urgent ones; None if none is ready."""

    @abstractmethod
    def restore(self, batch: FormedBatch) -> None:
        """What is left of a pulled batch that ran out of memory is small enough now: it waits again as it is."""

    @abstractmethod
    def split(self, batch: FormedBatch, now: float) -> Job | None:
        """A pulled batch ran out of memory (Magnus III-C): its halves wait again and take no more jobs.

        The caller has dropped the jobs that have ended or gone meanwhile; at least one is left.

        Returns:
            The job of a batch of one, which fits nowhere and has failed; None after a split.
        """

    def hold(self, memory_tokens: float, now: float) -> None:
        """Workers hold so many KV tokens from now on."""

    def next_due_at(self) -> float | None:
        """When ``pull`` will have a batch ready without anybody coming or going; None if only others can do that."""
        return None

    def flush(self, now: float) -> None:
        """Nobody else will come (a drain, the end of a trace): what waits for company is ready as it is."""

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` if the bookkeeping contradicts itself."""


class BatchQueue:
    """Batches that a worker may pull, and in which of them each job is: what batchers keep their formed ones in.

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

    def __iter__(self) -> Iterator[FormedBatch]:
        """In the order they were put in."""
        return iter(self._batches.values())

    def new_batch(self, now: float, sealed_at: float | None = None) -> FormedBatch:
        """An empty batch with the next id; it is not in the queue."""
        return FormedBatch(next(self._ids), now, sealed_at)

    def put(self, batch: FormedBatch) -> None:
        """Makes a batch available. O(batch)."""
        self._batches[batch.batch_id] = batch
        self._stand(batch, next(self._numbers))
        for job in batch.jobs:
            self._batch_of[job.request_id] = batch

    def insert(self, batch: FormedBatch, job: Job) -> None:
        """Puts a job into a batch of this queue. O(1)."""
        batch.insert(job)
        self._batch_of[job.request_id] = batch
        self._stand(batch, self._leave(batch))

    def remove(self, request_id: str) -> FormedBatch | None:
        """Takes a job out; a batch left empty goes with it. O(batch).

        Returns:
            The batch that it was in; None for an unknown id.
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

    def peek(self, now: float) -> FormedBatch | None:
        """The batch that is chosen among the most urgent ones; it stays."""
        if not self._batches:
            return None
        if self._by is not None:
            return self._in_order.peekitem(0)[1]
        urgency = min(batch.urgency for batch in self)
        return self._choose([batch for batch in self if batch.urgency == urgency], now)

    def pull(self, now: float) -> FormedBatch | None:
        """Takes the chosen batch, if there is one."""
        batch = self.peek(now)
        if batch is not None:
            self.take(batch, now)
        return batch

    def take(self, batch: FormedBatch, now: float) -> None:
        """Takes a batch of this queue out and seals it. O(batch)."""
        del self._batches[batch.batch_id]
        self._leave(batch)
        for job in batch.jobs:
            del self._batch_of[job.request_id]
        if batch.sealed_at is None:
            batch.sealed_at = now

    def split(self, batch: FormedBatch) -> Job | None:
        """Puts in the halves of a pulled batch, the first the larger, both sealed; see ``Batcher.split``."""
        if len(batch) == 1:
            return batch.jobs[0]
        middle = (len(batch) + 1) // 2
        for jobs in (batch.jobs[:middle], batch.jobs[middle:]):
            self._put_part(batch, jobs)
        return None

    def restore(self, batch: FormedBatch) -> None:
        """Puts a pulled batch in again, with the lengths that its jobs have now."""
        self._put_part(batch, batch.jobs)

    def _put_part(self, batch: FormedBatch, jobs: Sequence[Job]) -> None:
        part = self.new_batch(batch.created_at, batch.sealed_at)
        for job in jobs:
            part.insert(job)
        self.put(part)

    def _stand(self, batch: FormedBatch, number: int) -> None:
        """Where the choice is one that time does not change, a batch stands in order as it is now."""
        if self._by is not None:
            standing = self._standings[batch.batch_id] = batch.urgency, self._by(batch), number
            self._in_order[standing] = batch

    def _leave(self, batch: FormedBatch) -> int:
        """The batch stands in order no more; the number that it had."""
        if self._by is None:
            return 0
        standing = self._standings.pop(batch.batch_id)
        del self._in_order[standing]
        return standing[2]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every batch holds jobs, each where it should stand, and every job is in one."""
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
    """What a batcher is built from.

    Attributes:
        size: Jobs of a batch at most; None where memory alone decides.
    """

    settings: BatchSettings
    size: int | None


BATCHERS: Parts[Batcher, BatchContext] = Parts("scheduler.preset")
"""Batchers by the names that presets of batch mode use in the column of the order."""
