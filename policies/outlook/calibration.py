"""Corrects predicted quantiles by the ends that were seen, so that as many ends lie below them as they say.

Split conformal prediction over a sliding window (Papadopoulos et al., "Inductive Confidence Machines for
Regression", ECML 2002; Gibbs and Candès, "Adaptive Conformal Inference Under Distribution Shift", NeurIPS 2021, for
changing laws): a quantile is multiplied by the quantile of the factors that earlier predictions should have had. The
roll-out gives the shape, the correction gives the coverage. When more of the latest answers are late than chance
explains, the p90 widens at once, before the window has followed.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

LEVELS = (0.5, 0.9)
WINDOW = 1000
"""Latest predictions kept of each kind: several times as many as are in flight, of which only the ages are known."""

MIN_ENDS = 40
"""A kind with fewer ended jobs is corrected by the ended jobs of all kinds ..."""

MIN_ALL = 20
"""... and with fewer ended jobs of all kinds there is no correction."""

RECENT_ENDS = 100
"""Number of latest ends that span the period from which corrections and the least width of an interval are taken."""

LATEST = 20
"""Number of latest answers, ended or later than their p90, that show at once that a load has changed ..."""

ALARM = 0.005
"""... if chance, with a tenth of the answers late, makes as many late with less than this probability."""

LEAST_S = 1e-6

WIDE = 2.5
"""Ratio of p90 to p50 above which a prediction is of another kind."""


class Kind(NamedTuple):
    """The kind of a prediction; predictions of one kind are corrected together.

    Attributes:
        waits: The job had no place.
        octave: log2 of the median in seconds, rounded down.
        wide: p90 is more than ``WIDE`` times the median.
    """

    waits: bool
    octave: int
    wide: bool


class Raw(NamedTuple):
    """Quantiles of the roll-out, in seconds."""

    p50_s: float
    p90_s: float
    waits: bool

    @property
    def kind(self) -> Kind:
        octave = math.floor(math.log2(max(self.p50_s, 1e-3)))
        return Kind(self.waits, octave, self.p90_s > WIDE * self.p50_s)


class OnlineCalibration:
    """Factors of predicted quantiles, from the latest predictions.

    A prediction counts from the start: while its job goes on, its age is a lower bound (Kaplan-Meier). From ended jobs
    alone, short jobs would count first, and the factors would be too small after each change of traffic.
    """

    def __init__(self) -> None:
        self._all = _Window()
        self._told = (_Window(), _Window())  # corrected predictions: of jobs with a place, of jobs that waited
        self._said = _Window()  # corrected predictions of all jobs, in the same slots as in ``_all``
        self._kinds: dict[Kind, _Window] = {}
        self._open: dict[str, tuple[tuple[_Window, int], ...]] = {}
        self._factors: dict[Kind, tuple[float, float]] = {}  # as of one instant
        self._factors_at = -math.inf
        self._spreads: dict[bool, float] = {}  # as of one instant
        self._spreads_at = -math.inf
        self._lateness = (-math.inf, 0.0)  # as of one instant

    def begin(self, job_id: str, raw: Raw, now: float) -> None:
        """Records a prediction of the job's end, raw and corrected."""
        own = self._kinds.setdefault(raw.kind, _Window())
        self._open[job_id] = tuple((window, window.begin(raw[:2], now)) for window in (self._all, own))
        said = self._before_alarm(raw, now)
        self._open[job_id] += tuple((each, each.begin(said, now)) for each in (self._told[raw.waits], self._said))

    def end(self, job_id: str, now: float) -> None:
        """Records that the job has ended; unknown ids are ignored."""
        for window, number in self._open.pop(job_id, ()):
            window.end(number, now)

    def drop(self, job_id: str) -> None:
        """Stops counting the prediction of a job that has left before its end."""
        for window, number in self._open.pop(job_id, ()):
            window.drop(number)

    def corrected(self, raw: Raw, now: float) -> tuple[float, float]:
        """Returns the corrected (p50, p90) in seconds; O(WINDOW) for the first call of a kind at an instant."""
        p50_s, p90_s = self._before_alarm(raw, now)
        if now != self._lateness[0]:
            self._lateness = now, lateness(self._said.latest(self._all, now))
        return p50_s, max(p90_s, raw.p90_s * self._lateness[1])

    def _before_alarm(self, raw: Raw, now: float) -> tuple[float, float]:
        if now != self._factors_at:
            self._factors, self._factors_at = {}, now
        factors = self._factors.get(raw.kind)
        if factors is None:
            factors = self._factors[raw.kind] = self._factors_of(raw.kind, now)
        p50_s, p90_s = raw.p50_s * factors[0], raw.p90_s * factors[1]
        return p50_s, max(p50_s, p90_s, p50_s * self._spread(raw.waits, now))

    def _spread(self, waits: bool, now: float) -> float:
        """Returns the 0.9 quantile of (time taken / corrected median) over the last hundred jobs; 1 before any end."""
        if now != self._spreads_at:
            self._spreads, self._spreads_at = {}, now
        spread = self._spreads.get(waits)
        if spread is None:
            told = max((self._told[waits], self._told[not waits]), key=lambda each: min(each.num_ends, MIN_ENDS))
            spread = self._spreads[waits] = told.factor(0, LEVELS[1], now) if told.num_ends else 1.0
        return spread

    def _factors_of(self, kind: Kind, now: float) -> tuple[float, float]:
        window = self._kinds.get(kind, self._all)
        if window.num_ends < MIN_ENDS:
            window = self._all
        if window.num_ends < MIN_ALL:
            return 1.0, 1.0
        return window.factor(0, LEVELS[0], now), window.factor(1, LEVELS[1], now)


class _Window:
    """The latest ``WINDOW`` predictions of one kind."""

    def __init__(self) -> None:
        self._num = 0
        self._predicted = np.ones((WINDOW, len(LEVELS)))
        self._began_at = np.zeros(WINDOW)
        self._took_s = np.full(WINDOW, np.nan)  # NaN while the job goes on
        self._has_ended = np.zeros(WINDOW, np.bool_)
        self._ends: deque[float] = deque(maxlen=RECENT_ENDS)  # when the latest ended

    @property
    def num_ends(self) -> int:
        return int(np.count_nonzero(self._has_ended))

    def begin(self, predicted_s: tuple[float, float], now: float) -> int:
        """Returns the number of the prediction."""
        slot = self._num % WINDOW
        self._predicted[slot] = np.maximum(predicted_s, LEAST_S)
        self._began_at[slot], self._took_s[slot], self._has_ended[slot] = now, np.nan, False
        self._num += 1
        return self._num - 1

    def end(self, number: int, now: float) -> None:
        if number >= self._num - WINDOW:
            slot = number % WINDOW
            self._took_s[slot] = now - self._began_at[slot]
            self._has_ended[slot] = True
            self._ends.append(now)

    def drop(self, number: int) -> None:
        """Makes the prediction weigh nothing: gives its time the lower bound 0."""
        if number >= self._num - WINDOW:
            self._took_s[number % WINDOW] = 0.0

    def latest(self, raw: _Window, now: float) -> FloatArray:
        """Returns the latest predictions that have ended or are later than their p90.

        Shape (n, 3): the instant that settled each; its seconds as a multiple of its p90; as a multiple of the raw p90.
        """
        slots = np.arange(max(0, self._num - 4 * LATEST), self._num) % WINDOW
        began_at, p90_s, took_s = self._began_at[slots], self._predicted[slots, 1], self._took_s[slots]
        seconds = np.where(np.isnan(took_s), now - began_at, took_s)
        settled = self._has_ended[slots] | (seconds > p90_s)
        ratios = seconds / p90_s, seconds / raw._predicted[slots, 1]
        rows: FloatArray = np.stack((began_at + np.minimum(seconds, p90_s), *ratios), axis=1)
        found: FloatArray = rows[settled]
        return found

    def factor(self, column: int, level: float, now: float) -> float:
        """Returns the factor that puts a share ``level`` of ends below the predictions in a column.

        Each job counts from the beginning of the period of the latest ends: its time before belongs to another load.
        """
        num = min(self._num, WINDOW)
        took_s, began_at, predicted_s = self._took_s[:num], self._began_at[:num], self._predicted[:num, column]
        seconds = np.maximum(np.where(np.isnan(took_s), now - began_at, took_s), LEAST_S)
        has_ended, before_s = self._has_ended[:num], np.zeros(num)
        if len(self._ends) == RECENT_ENDS:
            before_s = np.maximum(self._ends[0] - LEAST_S - began_at, 0.0)
        seen = before_s < seconds
        if not has_ended[seen].any():  # the latest ends have left the window
            seen, before_s = np.ones(num, np.bool_), np.zeros(num)
        ratios, entered = seconds[seen] / predicted_s[seen], before_s[seen] / predicted_s[seen]
        return survival_quantile(ratios, has_ended[seen], level, entered)


def lateness(settled: FloatArray) -> float:
    """Returns the factor of the roll-out's p90s when the latest answers are late more often than chance explains.

    Tests the latest 1, 2, ... ``LATEST`` answers for an alarm. The factor is the largest 0.9 quantile of (seconds / raw
    p90) over the stretches with an alarm; 0 without an alarm.

    Args:
        settled: As ``_Window.latest`` gives them.
    """
    latest = settled[np.argsort(settled[:, 0], kind="stable")][::-1][:LATEST]
    num_late = np.cumsum(latest[:, 1] > 1.0)
    alarms = np.flatnonzero(num_late >= _ALARM_AT[: len(latest)])
    stretches = (latest[: last + 1, 2] for last in alarms)
    return max((float(np.quantile(each, LEVELS[1], method="higher")) for each in stretches), default=0.0)


def _alarm_at(num: int) -> int:
    """Returns the least number of late answers among ``num`` that chance does not explain."""
    late = 1.0 - LEVELS[1]
    chances = [math.comb(num, each) * late**each * (1.0 - late) ** (num - each) for each in range(num + 1)]
    return next((each for each in range(num + 1) if sum(chances[each:]) < ALARM), num + 1)


_ALARM_AT = np.array([_alarm_at(num) for num in range(1, LATEST + 1)])


def survival_quantile(
    values: FloatArray, is_exact: BoolArray, level: float, entered: FloatArray | None = None
) -> float:
    """Returns the Kaplan-Meier quantile of values, some of them lower bounds; linear between exact values.

    As in split conformal prediction, one further value counts as the largest.

    Args:
        values: Shape (n,).
        is_exact: False for a lower bound, shape (n,); True for at least one.
        entered: Value from which on each is observed, below its own (left truncation), shape (n,); None for 0.
    """
    order = np.argsort(values)
    values, is_exact = values[order], is_exact[order]
    at_risk = np.arange(len(values) + 1, 1, -1)
    if entered is not None:
        at_risk = at_risk - (len(entered) - np.searchsorted(np.sort(entered), values, side="left"))
    below = 1.0 - np.cumprod(np.where(is_exact, 1.0 - 1.0 / at_risk, 1.0))
    return float(np.interp(level, below[is_exact], values[is_exact]))
