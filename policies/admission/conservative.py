"""Conservative admission (the baseline of Past-Future, section 3): every output is taken to reach its limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from farsight.core.decisions import Facts
from farsight.core.errors import InvalidValueError
from farsight.policies.admission.past_future import future_memory
from farsight.policies.interfaces import ADMISSIONS, Admission, Job, ReplicaContext
from farsight.policies.lengths.history import IntArray


class Conservative(Admission):
    """Admits while prompts and output limits together, sum of (l_p + max_new), fit o times the pool.

    With an overcommit of 1, no job is ever evicted. ``admits`` and ``add`` are O(1); with releases O(n log n) and O(n).

    Args:
        overcommit: o, the assumed pool size as a multiple of the real one; above 0.
        counts_releases: Whether memory that jobs free when they reach their limits counts, by equations (2) to (4), as
        in LightLLM's scheduler of this name. It reserves less and is as safe.

    Raises:
        InvalidValueError: The overcommit is not above 0.
    """

    def __init__(self, overcommit: float = 1.0, *, counts_releases: bool = False) -> None:
        if not overcommit > 0:
            raise InvalidValueError("overcommit", overcommit, "a number > 0")
        self._overcommit = overcommit
        self._counts_releases = counts_releases
        self.begin([], 0)

    def begin(self, running: Sequence[Job], capacity: int) -> None:
        self._capacity = capacity
        self._limit = self._overcommitted(capacity)
        self._num_jobs = len(running)
        self._reserved = sum(job.prompt_len + job.max_new_tokens for job in running)
        self._base = np.array([job.known_len for job in running], np.int64)
        self._remaining = np.array([_remaining(job) for job in running], np.int64)

    def admits(self, job: Job) -> bool:
        """Returns whether the job fits; in an empty batch one step must fit, since waiting would free no memory."""
        if self._num_jobs == 0:
            return job.known_len + 1 <= self._capacity
        if self._counts_releases:
            return bool(future_memory(*self._with(job)) <= self._limit)
        return self._reserved + job.prompt_len + job.max_new_tokens <= self._limit

    def explain(self, job: Job, now: float) -> Facts:
        """Returns the tokens that all jobs hold at their limits, and the bound on these tokens."""
        peak, limit = float(self.predicted_peak), float(self._limit)
        return {"predicted_peak_tokens": peak, "limit_tokens": limit, "capacity_tokens": self._capacity}

    def add(self, job: Job) -> None:
        self._num_jobs += 1
        self._reserved += job.prompt_len + job.max_new_tokens
        if self._counts_releases:
            self._base, self._remaining = self._with(job)

    def reserve(self, capacity: int) -> int:
        return max(0, capacity - int(self._overcommitted(capacity)))

    @property
    def predicted_peak(self) -> int:
        """Tokens that the batch needs at most, by this rule."""
        return int(future_memory(self._base, self._remaining)) if self._counts_releases else self._reserved

    def _with(self, job: Job) -> tuple[IntArray, IntArray]:
        return np.append(self._base, job.known_len), np.append(self._remaining, _remaining(job))

    def _overcommitted(self, capacity: int) -> float:
        return round(self._overcommit * capacity, 6)


def _remaining(job: Job) -> int:
    return job.max_new_tokens - job.output_len


@ADMISSIONS.register("conservative")
def build_conservative(context: ReplicaContext) -> Conservative:
    """Admits as if every output reached its limit."""
    return Conservative(context.settings.scheduler.overcommit)
