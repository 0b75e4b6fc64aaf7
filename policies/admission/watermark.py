"""Aggressive admission under a watermark (the baseline of Past-Future, section 3; vLLM's rule), in tokens."""

from __future__ import annotations

from collections.abc import Sequence

from farsight.core.decisions import Facts
from farsight.core.errors import InvalidValueError
from farsight.policies.interfaces import ADMISSIONS, Admission, Job, ReplicaContext


class Aggressive(Admission):
    """Admits a job while the tokens held *now* plus its own stay within a share of the pool; growth is ignored.

    Everything is O(1), but ``begin``, which is O(n).

    Args:
        watermark: Share of the pool, in (0, 1].

    Raises:
        InvalidValueError: The watermark is out of range.
    """

    admits_what_fits = True

    def __init__(self, watermark: float = 0.95) -> None:
        if not 0 < watermark <= 1:
            raise InvalidValueError("watermark", watermark, "a share in (0, 1]")
        self._watermark = watermark
        self.begin([], 0)

    def begin(self, running: Sequence[Job], capacity: int) -> None:
        self._capacity = capacity
        self._limit = capacity - self.reserve(capacity)
        self._num_jobs = len(running)
        self._held = sum([job.prompt_len + job.output_len for job in running])

    def admits(self, job: Job) -> bool:
        """Returns whether the job's tokens fit below the watermark. An empty pool admits any job that fits."""
        return self._held + job.known_len <= (self._limit if self._num_jobs else self._capacity)

    def explain(self, job: Job, now: float) -> Facts:
        """Returns the tokens held now, and the limit."""
        return {"held_tokens": self._held, "limit_tokens": self._limit, "capacity_tokens": self._capacity}

    def add(self, job: Job) -> None:
        self._num_jobs += 1
        self._held += job.known_len

    def reserve(self, capacity: int) -> int:
        return capacity - int(round(self._watermark * capacity, 6))


@ADMISSIONS.register("watermark", steady=True)
def build_watermark(context: ReplicaContext) -> Aggressive:
    """Admits while the pool is filled below a share."""
    return Aggressive(context.settings.scheduler.watermark)
