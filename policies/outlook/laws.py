"""Laws (distributions) of the tokens that jobs have still to generate, for any order of the replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.forecast import Forecast
from policies.interfaces import Job
from policies.lengths import law as length_law
from policies.lengths.history import LengthHistory
from policies.lengths.trust import PredictorGate

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

REFRESH_ENDS = 50
"""Ends after which the history's half of all laws is computed again ..."""

MIN_ENDS = 20
"""... and ends after which it is first computed."""


class _Row(NamedTuple):
    """The whole law of one job, as ``policies.lengths.law.merged`` gives it, and its sources."""

    points: FloatArray
    from_forecast: BoolArray
    version: int
    forecast: Forecast | None


class RemainingLaws:
    """Forecast and history of lengths, mixed as the Gittins order mixes them (``policies.lengths``).

    A job without a forecast, before anything has ended, may be of any length up to its limit.
    """

    def __init__(self) -> None:
        self.gate = PredictorGate()
        self._history = LengthHistory(window=1000)
        self._points: FloatArray | None = None
        self._version = 0
        self._num_ends = 0
        self._rows: dict[str, _Row] = {}

    def learn(self, job: Job, *, censored: bool) -> None:
        """Learns the length of an ended job; ``censored``: the job was cut off."""
        self.forget(job.request_id)
        if job.forecast is not None and self._points is not None and not censored:
            self.gate.observe(length_law.forecast_points(job.forecast), self._points, job.output_len)
        self._history.add(job.output_len, censored=censored)
        self._num_ends += 1
        if self._num_ends == MIN_ENDS or self._num_ends % REFRESH_ENDS == 0:
            self._points = self._history.quantiles(length_law.LEVELS).astype(np.float64)
            self._version += 1

    def forget(self, request_id: str) -> None:
        """Forgets the law of a job that has left."""
        self._rows.pop(request_id, None)

    def remaining(self, jobs: Sequence[Job]) -> tuple[FloatArray, FloatArray]:
        """Returns the tokens still to come, rising in each row, and their probabilities; shapes (n, 64). O(64 n)."""
        rows = self._current(jobs)
        generated = np.array([job.output_len for job in jobs], np.float64)
        limits = np.array([job.max_new_tokens for job in jobs], np.float64)
        points, from_forecast = np.array([row.points for row in rows]), np.array([row.from_forecast for row in rows])
        return length_law.remaining(points, from_forecast, self.gate.omega, generated, limits)

    def _current(self, jobs: Sequence[Job]) -> list[_Row]:
        """Returns the rows of jobs; recomputes outdated rows together."""
        rows = [self._rows.get(job.request_id) for job in jobs]
        version = self._version
        old = [
            place
            for place, (row, job) in enumerate(zip(rows, jobs, strict=True))
            if row is None or row.version != version or row.forecast is not job.forecast
        ]
        if old:
            merged = length_law.merged(np.array([self._own(jobs[place], rows[place]) for place in old]), self._points)
            for place, points, from_forecast in zip(old, *merged, strict=True):
                job = jobs[place]
                rows[place] = self._rows[job.request_id] = _Row(points, from_forecast, version, job.forecast)
        return [row for row in rows if row is not None]

    def _own(self, job: Job, row: _Row | None) -> FloatArray:
        """Returns the forecast's half of a job's law."""
        if job.forecast is None:
            return length_law.UNKNOWN if self._points is not None else np.ceil(length_law.LEVELS * job.max_new_tokens)
        if row is not None and row.forecast is job.forecast:
            return row.points[row.from_forecast]
        return length_law.forecast_points(job.forecast)


def drawn(tokens: FloatArray, weights: FloatArray, levels: FloatArray) -> FloatArray:
    """Returns the lengths at given levels of each law; O(64 n s).

    Args:
        tokens: Shape (n, 64), rising in each row.
        weights: Probabilities, shape (n, 64).
        levels: In (0, 1), shape (n, s).

    Returns:
        Shape (n, s).
    """
    below = np.cumsum(weights, axis=1)
    at = (below[:, None, :] < levels[:, :, None] * below[:, None, -1:]).sum(axis=2)
    found: FloatArray = np.take_along_axis(tokens, np.minimum(at, tokens.shape[1] - 1), axis=1)
    return found
