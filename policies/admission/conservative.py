"""Conservative admission (the baseline of Past-Future, section 3): every output is taken to reach its limit."""

from __future__ import annotations

from collections.abc import Sequence

from farsight.core.decisions import Facts
from farsight.core.errors import InvalidValueError
from farsight.policies.interfaces import ADMISSIONS, Admission, Job, ReplicaContext


class Conservative(Admission):
    """Admits while prompts and output limits together, sum of (l_p + max_new), fit o times the pool.

    With an overcommit of 1, no job is ever evicted. ``admits`` and ``add`` are O(1).

    Args:
        overcommit: o, the assumed pool size as a multiple of the real one; above 0.

    Raises:
        InvalidValueError: The overcommit is not above 0.
    """

    admits_what_fits = True

    def __init__(self, overcommit: float = 1.0) -> None:
        if not overcommit > 0:
            raise InvalidValueError("overcommit", overcommit, "a number > 0")
        self._overcommit = overcommit
        self.begin([], 0)

    def begin(self, running: Sequence[Job], capacity: int) -> None:
        self._capacity = capacity
        self._limit = self._overcommitted(capacity)
        self._num_jobs = len(running)
        self._reserved = sum(map(self.most_tokens, running))

    def admits(self, job: Job) -> bool:
        """Returns whether the job fits; in an empty batch one step must fit, since waiting would free no memory."""
        if self._num_jobs == 0:
            return job.known_len + 1 <= self._capacity
        return self._reserved + self.most_tokens(job) <= self._limit

    def most_tokens(self, job: Job) -> int:
        """Returns the tokens that a job holds at most."""
        return job.prompt_len + job.max_new_tokens

    def explain(self, job: Job, now: float) -> Facts:
        """Returns the tokens that all jobs hold at their limits, and the bound on these tokens."""
        peak, limit = float(self.predicted_peak), float(self._limit)
        return {"predicted_peak_tokens": peak, "limit_tokens": limit, "capacity_tokens": self._capacity}

    def add(self, job: Job) -> None:
        self._num_jobs += 1
        self._reserved += self.most_tokens(job)

    def reserve(self, capacity: int) -> int:
        return max(0, capacity - int(self._overcommitted(capacity)))

    @property
    def predicted_peak(self) -> int:
        """Tokens that the batch needs at most, by this rule."""
        return self._reserved

    def _overcommitted(self, capacity: int) -> float:
        return round(self._overcommit * capacity, 6)


@ADMISSIONS.register("conservative")
def build_conservative(context: ReplicaContext) -> Conservative:
    """Admits as if every output reached its limit."""
    return Conservative(context.settings.scheduler.overcommit)
