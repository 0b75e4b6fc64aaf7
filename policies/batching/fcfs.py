"""Vanilla scheduling: first come, first served batches of a fixed size (the baselines VS and VSQ of Magnus)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from sortedcontainers import SortedKeyList

from farsight.core.errors import IntegrityError, InvalidValueError
from farsight.core.forecast import Forecast
from farsight.policies.batching.base import BATCHERS, BatchContext, BatchPolicy, BatchQueue, FormedBatch, first_arrived
from farsight.policies.interfaces import Job


def vanilla_batch_size(
    memory_bytes: float, token_bytes: float, max_prompt_len: int, max_new_tokens: int, delta_factor: float = 1.0
) -> int:
    """Returns how many requests of full length fit, Magnus eq. (1): beta = floor(Theta / ((L_max + G_max) Delta)).

    Args:
        memory_bytes: Theta, memory for KV.
        token_bytes: Delta, KV of one token.
        max_prompt_len: L_max, tokens.
        max_new_tokens: G_max, tokens.
        delta_factor: Multiplies Delta: 2 if a growing cache holds its old and new copy at once, which the paper's
        batch sizes 7 (VS) and 10 (VSQ) imply.

    Returns:
        At least 1: a single request is tried even if it may not fit.
    """
    for field, value in (("memory_bytes", memory_bytes), ("token_bytes", token_bytes), ("delta_factor", delta_factor)):
        if not value > 0:
            raise InvalidValueError(field, value, "a number above 0")
    if max_prompt_len + max_new_tokens < 1:
        raise InvalidValueError("max_prompt_len", max_prompt_len, "1 token or more with max_new_tokens")
    return max(1, int(memory_bytes / ((max_prompt_len + max_new_tokens) * token_bytes * delta_factor)))


class FcfsBatches(BatchPolicy):
    """An idle worker takes the first ``size`` jobs to arrive, or all if there are fewer; it never waits for more.

    ``add`` and ``remove`` cost O(log n), ``pull`` O(size log n).

    Args:
        size: Most jobs of a batch (beta).
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise InvalidValueError("size", size, "1 or more")
        self.size = size
        self._halves = BatchQueue(first_arrived)
        self._waiting = SortedKeyList(key=_rank)
        self._job_of: dict[str, Job] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._job_of) + self._halves.num_jobs

    def add(self, job: Job, now: float) -> None:
        self._job_of[job.request_id] = job
        self._waiting.add(job)

    def remove(self, request_id: str) -> None:
        job = self._job_of.pop(request_id, None)
        if job is None:
            self._halves.remove(request_id)
        else:
            self._waiting.remove(job)

    def foresee(self, made: Sequence[tuple[Job, Forecast]], now: float) -> None:
        """Sets the forecasts and moves no job: lengths do not count here."""
        for job, forecast in made:
            job.forecast = forecast
            half = self._halves.batch_of(job.request_id)
            if half is not None:
                half.refresh(job)

    def pull(self, now: float) -> FormedBatch | None:
        half = self._halves.peek(now)
        if half is not None and (not self._waiting or (half.urgency, half.arrived_at) <= _rank(self._waiting[0])):
            self._halves.take(half, now)
            return half
        if not self._waiting:
            return None
        batch = self._halves.new_batch(now, sealed_at=now)
        for job in self._waiting[: self.size]:
            batch.insert(job)
            del self._job_of[job.request_id]
        del self._waiting[: self.size]
        return batch

    def company(self, batch: FormedBatch, jobs: Iterable[Job]) -> list[Job]:
        return list(itertools.islice(jobs, max(0, self.size - len(batch))))

    def restore(self, batch: FormedBatch) -> None:
        self._halves.restore(batch)

    def split(self, batch: FormedBatch, now: float) -> Job | None:
        return self._halves.split(batch)

    def check_integrity(self) -> None:
        self._halves.check_integrity()
        if {id(job) for job in self._waiting} != {id(job) for job in self._job_of.values()}:
            raise IntegrityError("the waiting jobs differ from the known jobs")


def _rank(job: Job) -> tuple[tuple[int, float], float]:
    return job.urgency, job.arrived_at


@BATCHERS.register("fcfs-batches")
def build_fcfs_batches(context: BatchContext) -> FcfsBatches:
    """Forms batches of a fixed size in order of arrival."""
    return FcfsBatches(context.size or 1)
