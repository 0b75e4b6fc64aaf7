"""Past-Future admission (LightLLM, ASPLOS 2025): admit jobs that fit at the predicted peak of memory, not now.

Past outputs give a law of lengths (section 3.2); the predicted future is the batch run to its end (section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from farsight.core.decisions import Facts
from farsight.core.errors import InvalidValueError
from farsight.policies.interfaces import ADMISSIONS, Admission, Job, ReplicaContext
from farsight.policies.lengths.history import IntArray, LengthHistory

ENTRIES_PER_POINT = 200
"""A small batch gets several lists of draws, until it has about this many draws (LightLLM)."""

FRESH_DRAWS = 64
"""Number of candidates per draw; a single draw costs as much as all of them."""

ROW_KEY = 1 << 40
"""Far above any length: separates the rows of several lists in one sorted array."""


def peak_profile(base: IntArray, remaining: IntArray) -> tuple[IntArray, IntArray]:
    """Returns the memory at each completion, equations (2) and (3): entries by remaining length, the longest first.

    Args:
        base: b_i = l_p + l_t, tokens held now, shape (n,).
        remaining: r_i = predicted length - l_t, shape (n,), or (lists, n) for several predictions.

    Returns:
        Decoding steps ahead (r_i, not rising) and tokens in use then (M_i, the one that completes still counted), both
        of the shape of ``remaining``. O(n log n) each list.
    """
    negated = -remaining
    order = negated.argsort(axis=-1, kind="stable")
    negated.sort(axis=-1)
    steps = -negated
    rank = np.arange(1, len(base) + 1)
    return steps, base[order].cumsum(axis=-1) + rank * steps


def future_memory(base: IntArray, remaining: IntArray) -> IntArray:
    """Returns M*, the most tokens that the batch will use at once if no job joins: equation (4); 0 for no entries.

    Arguments as for ``peak_profile``; one number for each list, shape ``remaining.shape[:-1]``.
    """
    peaks: IntArray = np.max(peak_profile(base, remaining)[1], axis=-1, initial=0)
    return peaks


class PeakIndex:
    """M* of a batch plus one more entry in O(log n) per entry; O(n log n) to build.

    With the entries sorted by remaining length, longest first, a new entry (b, r) at position k + 1 leaves M_1 ... M_k
    unchanged and adds b + r_j to each later M_j. The maxima of M_j up to k and of M_j + r_j from k + 1 give M*.

    Args:
        base: Shape (n,).
        remaining: Shape (lists, n): several predictions; the largest M* counts.
    """

    def __init__(self, base: IntArray, remaining: IntArray) -> None:
        num_lists, num_entries = remaining.shape
        steps, memory = peak_profile(base, remaining)
        # Tables over k = 0 ... n, one row per list, indexed as one flat array.
        self._held_before, self._peak_before, self._grown_after = np.zeros((3, num_lists, num_entries + 1), np.int64)
        np.subtract(memory, np.arange(1, num_entries + 1) * steps, out=self._held_before[:, 1:])
        np.maximum.accumulate(memory, axis=1, out=self._peak_before[:, 1:])
        np.maximum.accumulate((memory + steps)[:, ::-1], axis=1, out=self._grown_after[:, -2::-1])
        self._rows = np.arange(num_lists)[:, None]
        self._num_entries = num_entries
        self._sorted_keys = (self._rows * ROW_KEY - steps).ravel()

    def peaks_with(self, base: IntArray, remaining: IntArray) -> IntArray:
        """Returns M* if one entry joins, for each of m: max(P_k, S_k + b + (k + 1) r, b + Q_(k+1)).

        Args:
            base: Shape (m,).
            remaining: Shape (lists, m).

        Returns:
            Shape (m,).
        """
        index = np.searchsorted(self._sorted_keys, self._rows * ROW_KEY - remaining, side="right")
        rank = index - self._rows * self._num_entries
        index += self._rows
        at_its_end = self._held_before.take(index) + base + (rank + 1) * remaining
        peaks = np.maximum(self._peak_before.take(index), base + self._grown_after.take(index))
        worst: IntArray = np.maximum(peaks, at_its_end).max(axis=0)
        return worst


class Lengths(Protocol):
    """A source of predicted output lengths."""

    def draw(self, jobs: Sequence[Job], num_lists: int) -> IntArray:
        """Returns whole output lengths, longer than what each job has generated; shape (num_lists, len(jobs))."""
        ...

    def draw_one(self, job: Job, num_lists: int) -> Sequence[int]:
        """Returns ``num_lists`` lengths of one job, as in ``draw``."""
        ...

    def learn(self, output_len: int, *, censored: bool) -> None:
        """Records that a job has ended with this many tokens."""
        ...


class HistoryLengths:
    """Draws from the last outputs of all jobs (equation 1), as in the paper.

    Args:
        history: The window of finished outputs; only this object adds to it.
        rng: Random generator of the draws.
    """

    def __init__(self, history: LengthHistory, rng: np.random.Generator) -> None:
        self.history = history
        self._rng = rng
        self._fresh: list[list[int]] = []
        self._fresh_of = (0, 0)

    def draw(self, jobs: Sequence[Job], num_lists: int) -> IntArray:
        generated = _int_array([job.output_len for job in jobs])
        limit = _int_array([job.max_new_tokens for job in jobs])
        return self.history.sample_above(self._rng, generated, limit, num_lists)

    def draw_one(self, job: Job, num_lists: int) -> Sequence[int]:
        """Draws one job's lengths; O(1) amortised for a job without output: all these share one law, drawn ahead."""
        if job.output_len:
            drawn: list[int] = self.draw([job], num_lists)[:, 0].tolist()
            return drawn
        if not self._fresh or self._fresh_of != (self.history.version, num_lists):
            self._fresh_of = (self.history.version, num_lists)
            nothing, no_limit = np.zeros(FRESH_DRAWS, np.int64), np.full(FRESH_DRAWS, np.iinfo(np.int64).max)
            self._fresh = self.history.sample_above(self._rng, nothing, no_limit, num_lists).T.tolist()
        return [min(length, job.max_new_tokens) for length in self._fresh.pop()]

    def learn(self, output_len: int, *, censored: bool) -> None:
        self.history.add(output_len, censored=censored)


class TrueLengths:
    """Takes the mean of each job's forecast as its length: the paper's oracle, with ``reserve_ratio=0, max_lists=1``.

    A job without a forecast, or one that has outlived its forecast, counts with its limit.
    """

    def draw(self, jobs: Sequence[Job], num_lists: int) -> IntArray:
        return np.tile(_int_array([_true_len(job) for job in jobs]), (num_lists, 1))

    def draw_one(self, job: Job, num_lists: int) -> Sequence[int]:
        return [_true_len(job)] * num_lists

    def learn(self, output_len: int, *, censored: bool) -> None:
        """Does nothing: the forecasts need no history."""


class PastFuture(Admission):
    """Algorithm 1: admits a job if the peak M* of the batch with it fits, with new draws at each scheduling point.

    A small batch gets several lists of draws and all of them must fit ("the sampling prediction is repeated several
    times", section 4). ``begin`` and ``add`` are O(n), ``admits`` is O(n log n), each times the lists.

    Args:
        lengths: Source of predicted lengths.
        reserve_ratio: rho, the share of memory reserved for outputs longer than predicted, in [0, 1).
        strict: Require M* < capacity, as LightLLM does, instead of M* <= capacity.
        max_lists: Number of lists of draws for the smallest batches, at least 1.

    Raises:
        InvalidValueError: A parameter is out of range.
    """

    admits_what_fits = True

    def __init__(
        self, lengths: Lengths, *, reserve_ratio: float = 0.05, strict: bool = False, max_lists: int = 5
    ) -> None:
        if not 0 <= reserve_ratio < 1:
            raise InvalidValueError("reserve_ratio", reserve_ratio, "a share in [0, 1)")
        if max_lists < 1:
            raise InvalidValueError("max_lists", max_lists, "an integer >= 1")
        self._lengths = lengths
        self._reserve_ratio = reserve_ratio
        self._strict = strict
        self._max_lists = max_lists
        self.begin([], 0)

    def begin(self, running: Sequence[Job], capacity: int) -> None:
        """Draws new lengths for all running jobs (lines 4 to 8 of Algorithm 1)."""
        self._capacity = capacity
        self._limit = round((1 - self._reserve_ratio) * capacity, 6)  # Rounded, so that 0.9 * 30 is exactly 27.
        self._num_jobs = len(running)
        self._num_lists = self._lists_for(len(running))
        self._drawn: dict[str, Sequence[int]] = {}
        self._peaks: dict[str, int] = {}  # of the batch with each job, as of the latest ``admits`` for it
        generated = _int_array([job.output_len for job in running])
        self._base = _int_array([job.prompt_len for job in running]) + generated
        self._remaining = self._lengths.draw(running, self._num_lists) - generated

    def admits(self, job: Job) -> bool:
        """Returns whether the job fits (lines 9 to 13).

        An empty batch admits any job that can run one step, a case that the paper leaves open. Repeated calls at one
        scheduling point use the same draws.
        """
        if self._num_jobs == 0:
            return job.known_len + 1 <= self._capacity
        peak = self._peaks[job.request_id] = int(future_memory(*self._with(job)).max())
        return peak < self._limit if self._strict else peak <= self._limit

    def explain(self, job: Job, now: float) -> Facts:
        """Returns the predicted peak that decided about the job; in an empty batch its length alone."""
        peak = self._peaks.get(job.request_id, job.known_len + 1)
        return {"predicted_peak_tokens": peak, "limit_tokens": self._limit, "capacity_tokens": self._capacity}

    def fits(self, jobs: Sequence[Job]) -> NDArray[np.bool_]:
        """Returns the answer of ``admits`` for each job alone beside the batch, in O(log n) per job; shape (jobs,)."""
        base = _int_array([job.known_len for job in jobs])
        if self._num_jobs == 0:
            return base + 1 <= self._capacity
        peaks = PeakIndex(self._base, self._remaining).peaks_with(base, self._remaining_of(jobs))
        return peaks < self._limit if self._strict else peaks <= self._limit

    def add(self, job: Job) -> None:
        self._num_jobs += 1
        self._base, self._remaining = self._with(job)

    def reserve(self, capacity: int) -> int:
        return capacity - int(round((1 - self._reserve_ratio) * capacity, 6))

    def learn(self, output_len: int, *, censored: bool) -> None:
        self._lengths.learn(output_len, censored=censored)

    @property
    def predicted_peak(self) -> int:
        """M* of the present batch in tokens; the highest of all lists."""
        return int(future_memory(self._base, self._remaining).max())

    def _with(self, job: Job) -> tuple[IntArray, IntArray]:
        """Returns the batch with the job: b_i, shape (n + 1,), and r_i of each list, shape (lists, n + 1)."""
        column = self._remaining_of([job])
        return np.append(self._base, job.known_len), np.concatenate([self._remaining, column], axis=1)

    def _remaining_of(self, jobs: Sequence[Job]) -> IntArray:
        """Returns remaining lengths by this point's draws, made at a job's first question; shape (lists, jobs)."""
        new = [job for job in jobs if job.request_id not in self._drawn]
        if len(new) == 1:
            self._drawn[new[0].request_id] = self._lengths.draw_one(new[0], self._num_lists)
        elif new:
            lengths = self._lengths.draw(new, self._num_lists).T.tolist()
            self._drawn.update(zip([job.request_id for job in new], lengths, strict=True))
        drawn = _int_array([self._drawn[job.request_id] for job in jobs])
        return drawn.T - _int_array([job.output_len for job in jobs])

    def _lists_for(self, num_running: int) -> int:
        return min(self._max_lists, ENTRIES_PER_POINT // num_running + 1) if num_running else 1


def _true_len(job: Job) -> int:
    foreseen = 0 if job.forecast is None else round(job.forecast.mean)
    return min(foreseen, job.max_new_tokens) if foreseen > job.output_len else job.max_new_tokens


def _int_array(values: Sequence[int] | Sequence[Sequence[int]]) -> IntArray:
    return np.array(values, np.int64)


@ADMISSIONS.register("past-future")
def build_past_future(context: ReplicaContext) -> PastFuture:
    """Admits by the predicted peak of memory, lengths drawn from recent outputs."""
    settings = context.settings
    history = LengthHistory(settings.scheduler.history_window, [settings.max_new_tokens])
    return PastFuture(
        HistoryLengths(history, np.random.default_rng(settings.seed)), reserve_ratio=settings.scheduler.reserve_ratio
    )


@ADMISSIONS.register("oracle")
def build_oracle(context: ReplicaContext) -> PastFuture:
    """Admits by the true lengths: the bound of what Past-Future can reach."""
    return PastFuture(TrueLengths(), reserve_ratio=0.0, max_lists=1)
