"""Past-Future with each job's own forecast; its one parameter is the risk of an eviction.

It keeps the predicted peak of Past-Future (its section 3.3) and replaces the pooled law of lengths, the reserve and the
repeated draws. For a small batch it evaluates scenarios; for a large one it uses the mean and the spread of its memory
at each time ahead, since the jobs' deviations average out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from core.decisions import Facts
from core.errors import IntegrityError, InvalidValueError
from policies.admission.past_future import future_memory
from policies.interfaces import ADMISSIONS, Admission, Job, ReplicaContext
from policies.lengths.history import FloatArray, IntArray
from policies.order.gittins import Gittins

NUM_SCENARIOS = 32
"""Number of scenarios of a small batch, and of points that represent each job's law."""

LARGE_BATCH = 30
"""Number of jobs from which the normal bound is used; for two jobs it is far too wide."""

NUM_INTERVALS = 140
"""Number of intervals of the time ahead, for a large batch."""

_MIDDLE = 2 * np.arange(NUM_SCENARIOS) + 1


class ForecastAdmission(Admission):
    """Admits a job if memory overflows with a probability of at most ``eviction_risk``, by the jobs' own laws.

    n jobs: ``begin`` O(n) laws; ``admits`` O(32 n log n) below 30 jobs, from there O(140) after a first one of
    O(140 n); ``add`` as ``admits``.

    Args:
        law: Equiprobable whole output lengths of a job in tokens, longer than what it has generated, shape (any,).
            Called once per job and scheduling point.
        rng: Draws, when a job is first seen, the scenarios in which its points occur.
        eviction_risk: delta, in (0, 0.5].

    Raises:
        InvalidValueError: The risk is out of range.
    """

    max_skips = 4
    """The walk stops after this many refusals, so that a large job at the head does not block small ones."""

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
        self._rng = rng
        self._eviction_risk = eviction_risk
        self._num_exceeding = math.floor(eviction_risk * NUM_SCENARIOS)
        self._z = NormalDist().inv_cdf(1 - eviction_risk)
        self._points: dict[str, IntArray] = {}
        self._strata: dict[str, IntArray] = {}
        self.begin([], 0)

    def begin(self, running: Sequence[Job], capacity: int) -> None:
        self._capacity = capacity
        self._strata = {name: strata for name, strata in self._strata.items() if name in self._points}
        self._points = {}
        self._jobs = list(running)
        self._base = np.array([job.known_len for job in running], np.int64)
        self._remaining = self._remaining_points(running)
        self._spread: MemorySpread | None = None
        self._peaks: dict[
            str, int
        ] = {}  # Peak of the batch with each job that was asked about, at the time of the question.

    def admits(self, job: Job) -> bool:
        """Into an empty batch goes what can make one step: nothing else helps it."""
        if not self._jobs:
            return job.known_len + 1 <= self._capacity
        peak = self._peaks[job.request_id] = self._peak_with(job)
        return peak <= self._capacity

    def explain(self, job: Job, now: float) -> Facts:
        """The predicted peak that decided about the job; in an empty batch its length alone."""
        peak = self._peaks.get(job.request_id, job.known_len + 1)
        return {"predicted_peak_tokens": peak, "limit_tokens": self._capacity, "eviction_risk": self._eviction_risk}

    def add(self, job: Job) -> None:
        remaining = self._remaining_points([job])
        if self._spread is not None:
            self._spread = self._spread_reaching(remaining).with_job(job.known_len, remaining)
        self._jobs.append(job)
        self._base = np.append(self._base, job.known_len)
        self._remaining = np.concatenate([self._remaining, remaining])

    def reserve(self, capacity: int) -> int:
        """No reserve: the risk is the only margin."""
        return 0

    @property
    def predicted_peak(self) -> int:
        """Tokens that the present batch exceeds only with the given risk."""
        if len(self._jobs) < LARGE_BATCH:
            return self._peak_of_scenarios(self._jobs, self._base, self._remaining)
        return self._spread_reaching(self._remaining).peak(self._z)

    def check_integrity(self) -> None:
        """Raises:
        IntegrityError: The running sums differ from the sums over the batch.
        """
        if self._spread is not None:
            whole = MemorySpread.of(self._base, self._remaining, self._spread.width)
            if not (np.allclose(whole.mean, self._spread.mean) and np.allclose(whole.variance, self._spread.variance)):
                raise IntegrityError(f"memory of {len(self._jobs)} jobs: the running sums have drifted")

    def _peak_with(self, job: Job) -> int:
        remaining = self._remaining_points([job])
        if len(self._jobs) + 1 < LARGE_BATCH:
            base = np.append(self._base, job.known_len)
            return self._peak_of_scenarios([*self._jobs, job], base, np.concatenate([self._remaining, remaining]))
        return self._spread_reaching(remaining).with_job(job.known_len, remaining).peak(self._z)

    def _peak_of_scenarios(self, jobs: Sequence[Job], base: IntArray, remaining: IntArray) -> int:
        """The (1 - delta)-quantile of M*: at most a share delta of the scenarios is above it."""
        if not jobs:
            return 0
        strata = np.stack([self._strata_of(job) for job in jobs])
        peaks = np.sort(future_memory(base, np.take_along_axis(remaining, strata, axis=1).T))
        return int(peaks[-1 - self._num_exceeding])

    def _strata_of(self, job: Job) -> IntArray:
        """The job's point in each scenario: every point once, in a random order that stays the same while the job is
        seen at each scheduling point. So answers change only with events, not with a new shuffle.
        """
        strata = self._strata.get(job.request_id)
        if strata is None:
            strata = self._strata[job.request_id] = self._rng.permutation(NUM_SCENARIOS)
        return strata

    def _spread_reaching(self, remaining: IntArray) -> MemorySpread:
        """The batch's sums over a time ahead in which these jobs end too; recomputed only for a longer time."""
        longest = int(remaining.max())
        if self._spread is None or longest > self._spread.width * NUM_INTERVALS:
            longest = max(longest, int(self._remaining.max()))
            self._spread = MemorySpread.of(self._base, self._remaining, -(-longest // NUM_INTERVALS))
        return self._spread

    def _remaining_points(self, jobs: Sequence[Job]) -> IntArray:
        """The midpoints of 32 strata of each job's law, less its generated tokens; rising, at least one token.

        Shape (jobs, 32). Each law is computed once per scheduling point.
        """
        new = [job for job in jobs if job.request_id not in self._points]
        if new:
            lengths = np.stack([_middle_points(self._law(job)) for job in new])
            generated = np.array([[job.output_len] for job in new])
            most = np.maximum(1, np.array([[job.max_new_tokens] for job in new]) - generated)
            points = np.ceil(lengths - generated).astype(np.int64).clip(1, most)
            self._points.update(zip([job.request_id for job in new], points, strict=True))
        return np.array([self._points[job.request_id] for job in jobs], np.int64).reshape(-1, NUM_SCENARIOS)


def _middle_points(lengths: FloatArray | IntArray) -> FloatArray:
    """The midpoints of 32 strata of equal mass, rising."""
    return np.sort(lengths).astype(np.float64)[_MIDDLE * len(lengths) // (2 * NUM_SCENARIOS)]


class MemorySpread:
    """Mean and variance of the memory of independent jobs, over intervals of time ahead; each shape (140,).

    Memory t steps ahead is the sum of (b_i + t) over the jobs with r_i >= t. Each interval counts the jobs present at
    its beginning with their size at its end, so that it never hides a peak inside it.
    """

    def __init__(self, mean: FloatArray, variance: FloatArray, width: int) -> None:
        self.mean, self.variance, self.width = mean, variance, width

    @classmethod
    def of(cls, base: IntArray, remaining: IntArray, width: int) -> MemorySpread:
        """Moments of jobs that hold ``base`` tokens, shape (n,), with points ``remaining``, shape (n, 32)."""
        num_jobs = len(base)
        ended = -(-remaining // width) - 1 + np.arange(num_jobs)[:, None] * NUM_INTERVALS
        num_ended = np.bincount(ended.ravel(), minlength=num_jobs * NUM_INTERVALS).reshape(num_jobs, -1)
        alive = num_ended[:, ::-1].cumsum(axis=1)[:, ::-1] / NUM_SCENARIOS
        size = base[:, None] + np.arange(1, NUM_INTERVALS + 1) * width
        held = size * alive
        return cls(held.sum(axis=0), (held * (size - held)).sum(axis=0), width)

    def with_job(self, base: int, remaining: IntArray) -> MemorySpread:
        job = MemorySpread.of(np.array([base]), remaining, self.width)
        return MemorySpread(self.mean + job.mean, self.variance + job.variance, self.width)

    def peak(self, z: float) -> int:
        """The highest mean plus z standard deviations, rounded up."""
        return math.ceil(round(float((self.mean + z * np.sqrt(self.variance)).max()), 6))


@ADMISSIONS.register("forecast", needs="gittins", reads_forecasts=True)
def build_forecast_admission(context: ReplicaContext) -> ForecastAdmission:
    """Admits by each job's own law of lengths, which the Gittins order keeps."""
    order, settings = context.order_as(Gittins), context.settings
    rng = np.random.default_rng(settings.seed)
    return ForecastAdmission(order.lengths, rng, eviction_risk=settings.eviction_risk)
