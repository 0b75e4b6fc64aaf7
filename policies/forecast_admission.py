"""Past-Future by each job's own forecast, with the risk of an eviction as its one knob.

It keeps the predicted peak of Past-Future (its section 3.3) and replaces the pooled law of lengths, the reserve and the
repeated draws. A small batch is run through scenarios; a large one is described by the mean and the spread of its
memory at each time ahead, since its jobs' deviations average out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from core.errors import IntegrityError, InvalidValueError
from policies.job import Job
from policies.length_history import FloatArray, IntArray
from policies.past_future import future_memory

NUM_SCENARIOS = 32
"""Futures a small batch is run through, and points that each job's law is reduced to."""

LARGE_BATCH = 30
"""From so many jobs on the normal bound is used; for two jobs it is far too wide."""

NUM_INTERVALS = 140
"""Intervals that the time ahead is cut into for a large batch."""


class ForecastAdmission:
    """Admits a job if memory overflows with a probability of at most ``eviction_risk``, by the jobs' own laws.

    n jobs: ``begin`` O(n) laws; ``admits`` O(32 n log n) below 30 jobs, from there O(140) after a first one of
    O(140 n); ``add`` as ``admits``.

    Args:
        law: Equiprobable whole output lengths of a job in tokens, longer than what it has generated, shape (any,).
            Asked once per job and point.
        rng: Decides once which points of the jobs' laws meet in a scenario.
        eviction_risk: delta, in (0, 0.5].

    Raises:
        InvalidValueError: a risk out of range.
    """

    max_skips = 4
    """So many jobs may be refused before the walk stops: a large one at the head does not hold back small ones."""

    def __init__(
        self,
        law: Callable[[Job], NDArray[np.float64] | IntArray],
        rng: np.random.Generator,
        *,
        eviction_risk: float = 0.05,
    ) -> None:
        if not 0 < eviction_risk <= 0.5:
            raise InvalidValueError("eviction_risk", eviction_risk, "a probability in (0, 0.5]")
        self._law = law
        self._num_exceeding = math.floor(eviction_risk * NUM_SCENARIOS)
        self._z = NormalDist().inv_cdf(1 - eviction_risk)
        # Stratified: over all scenarios every job meets each of its points once, in an order of its own.
        self._strata = np.stack([rng.permutation(NUM_SCENARIOS) for _ in range(LARGE_BATCH)])
        self.begin([], 0)

    def begin(self, running: Sequence[Job], capacity: int) -> None:
        self._capacity = capacity
        self._base = [job.known_len for job in running]
        self._remaining = [self._remaining_points(job) for job in running]
        self._spread: MemorySpread | None = None

    def admits(self, job: Job) -> bool:
        """Into an empty batch goes what can make one step: nothing else helps it."""
        if not self._base:
            return job.known_len + 1 <= self._capacity
        return self._peak_with(job.known_len, self._remaining_points(job)) <= self._capacity

    def add(self, job: Job) -> None:
        remaining = self._remaining_points(job)
        if self._spread is not None:
            self._spread = self._spread_reaching(remaining).with_job(job.known_len, remaining)
        self._base.append(job.known_len)
        self._remaining.append(remaining)

    def reserve(self, capacity: int) -> int:
        """Nothing beside the risk that is taken."""
        return 0

    def learn(self, output_len: int, *, censored: bool) -> None:
        """Whoever makes the law learns elsewhere."""

    @property
    def predicted_peak(self) -> int:
        """Tokens that the batch as it is stays within, but for the risk."""
        if len(self._base) < LARGE_BATCH:
            return self._peak_of_scenarios(self._base, self._remaining)
        return self._spread_reaching(self._remaining[-1]).peak(self._z)

    def check_integrity(self) -> None:
        """Raises:
        IntegrityError: what was summed up job by job is not the sum of the batch.
        """
        if self._spread is not None:
            whole = MemorySpread.of(self._base, self._remaining, self._spread.width)
            if not (np.allclose(whole.mean, self._spread.mean) and np.allclose(whole.variance, self._spread.variance)):
                raise IntegrityError(f"memory of {len(self._base)} jobs: the running sums have drifted")

    def _peak_with(self, base: int, remaining: IntArray) -> int:
        if len(self._base) + 1 < LARGE_BATCH:
            return self._peak_of_scenarios([*self._base, base], [*self._remaining, remaining])
        return self._spread_reaching(remaining).with_job(base, remaining).peak(self._z)

    def _peak_of_scenarios(self, base: list[int], remaining: list[IntArray]) -> int:
        """The (1 - delta)-quantile of M*: at most a share delta of the scenarios is above it."""
        if not base:
            return 0
        points = np.take_along_axis(np.stack(remaining), self._strata[: len(base)], axis=1)
        peaks = np.sort(future_memory(np.array(base, np.int64), points.T))
        return int(peaks[-1 - self._num_exceeding])

    def _spread_reaching(self, remaining: IntArray) -> MemorySpread:
        """The batch's sums over a time ahead in which this job ends too; cut anew only for a longer one."""
        longest = int(remaining[-1])
        if self._spread is None or longest > self._spread.width * NUM_INTERVALS:
            longest = max(longest, *(int(points[-1]) for points in self._remaining))
            self._spread = MemorySpread.of(self._base, self._remaining, -(-longest // NUM_INTERVALS))
        return self._spread

    def _remaining_points(self, job: Job) -> IntArray:
        """The middle points of 32 strata of the job's law, less what it has generated; rising, at least one token."""
        lengths = np.sort(np.asarray(self._law(job)))
        middle = (np.arange(NUM_SCENARIOS) + 0.5) * len(lengths) / NUM_SCENARIOS
        most = max(1, job.max_new_tokens - job.output_len)
        points: IntArray = np.ceil(lengths[middle.astype(np.int64)] - job.output_len).astype(np.int64).clip(1, most)
        return points


class MemorySpread:
    """Mean and variance of the memory of independent jobs, over intervals of time ahead; each shape (140,).

    Memory t steps ahead is the sum of (b_i + t) over those with r_i >= t. Of an interval those count that are there
    when it begins, each as large as it is when it ends: an interval never hides a peak inside it.
    """

    def __init__(self, mean: FloatArray, variance: FloatArray, width: int) -> None:
        self.mean, self.variance, self.width = mean, variance, width

    @classmethod
    def of(cls, base: Sequence[int], remaining: Sequence[IntArray], width: int) -> MemorySpread:
        ends = np.arange(1, NUM_INTERVALS + 1) * width
        size = np.array(base)[:, None] + ends
        ended = -(-np.stack(remaining) // width) + np.arange(len(base))[:, None] * NUM_INTERVALS
        num_ended = np.bincount(ended.ravel() - 1, minlength=len(base) * NUM_INTERVALS)
        num_left = num_ended.reshape(len(base), -1)[:, ::-1].cumsum(axis=1)[:, ::-1]
        alive = num_left / NUM_SCENARIOS
        return cls((size * alive).sum(axis=0), (size**2 * alive * (1 - alive)).sum(axis=0), width)

    def with_job(self, base: int, remaining: IntArray) -> MemorySpread:
        job = MemorySpread.of([base], [remaining], self.width)
        return MemorySpread(self.mean + job.mean, self.variance + job.variance, self.width)

    def peak(self, z: float) -> int:
        """Highest mean + z standard deviations, rounded up."""
        return math.ceil(round(float((self.mean + z * np.sqrt(self.variance)).max()), 6))
