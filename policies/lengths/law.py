"""The law of a job's whole output length: a mixture of its own forecast and the latest finished outputs.

A law is 64 points: 32 equiprobable ones of the forecast with weight omega in all, 32 quantiles of the last finished
outputs with the rest. Everything is vectorised over jobs.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import QUANTILES, Forecast

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

NUM_POINTS = 32
"""Number of points of each of the two halves."""
LEVELS: FloatArray = (np.arange(NUM_POINTS) + 0.5) / NUM_POINTS
"""Middles of 32 equal shares of probability."""
UNKNOWN: FloatArray = np.full(NUM_POINTS, np.inf)
"""Points of a missing half."""
NORMAL_SPAN = 2.563
"""Standard deviations of a normal law between the levels 0.1 and 0.9, the first and the fifth of ``QUANTILES``."""

MIN_REMAINING = 16
"""Least remaining tokens predicted for a job that has outlived its law."""


def forecast_points(forecast: Forecast) -> FloatArray:
    """Returns equiprobable output lengths, not falling, shape (32,); equal quantiles give a deterministic law.

    Linear between the levels of ``QUANTILES``, flat outside; rounded up to whole tokens.
    """
    return np.ceil(np.interp(LEVELS, QUANTILES, forecast.quantiles))


def variance(forecast: Forecast) -> float:
    """Returns the output length's variance in tokens squared, by a normal law with the same quantiles 0.1 and 0.9."""
    deviation = (forecast.quantiles[4] - forecast.quantiles[0]) / NORMAL_SPAN
    return deviation * deviation


def merged(forecasts: FloatArray, history: FloatArray | None) -> tuple[FloatArray, BoolArray]:
    """Returns the points of both halves in rising order, and which of them the forecast gave; shapes (n, 64). O(n).

    Args:
        forecasts: Points of each job, shape (n, 32), rising; infinite for a job without a forecast.
        history: Shape (32,), rising; None before any output has finished, which gives infinite points.
    """
    common = UNKNOWN if history is None else history
    # A merge, since both halves are sorted: a point stands behind its own half's and the other's smaller ones.
    at = np.searchsorted(common, forecasts) + np.arange(NUM_POINTS)
    from_forecast = np.zeros((len(forecasts), 2 * NUM_POINTS), np.bool_)
    np.put_along_axis(from_forecast, at, True, axis=1)
    points = np.empty(from_forecast.shape)
    points[from_forecast] = forecasts.ravel()
    points[~from_forecast] = np.tile(common, len(forecasts))
    return points, from_forecast


def remaining(
    points: FloatArray, from_forecast: BoolArray, omega: float, generated: FloatArray, limit: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Returns the law of the remaining tokens given that the output is longer than ``generated``; O(64 n).

    Where no point is left, all mass is on max(generated / 4, 16). No answer exceeds limit - generated, none is below 1.

    Args:
        points: Shape (n, 64), rising in each row; infinite ones do not count.
        from_forecast: Shape (n, 64).
        omega: Weight of the forecast's half, in [0, 1).
        generated: Shape (n,).
        limit: max_new_tokens, shape (n,).

    Returns:
        Tokens and probabilities, shapes (n, 64); tokens do not fall within a row, save where the probability is 0.
    """
    left = points - generated[:, None]
    # Without history, the forecast's half counts in full whatever omega is, so its weight must not be 0.
    weights = np.where(from_forecast, max(omega, 1e-9), 1.0 - omega)
    weights *= left > 0
    weights *= points < np.inf
    outlived = ~weights.any(axis=1)
    if outlived.any():
        left[outlived] = np.maximum(np.ceil(generated[outlived] / 4), MIN_REMAINING)[:, None]
        weights[outlived] = 1.0
    weights /= weights.sum(axis=1, keepdims=True)
    np.maximum(left, 1.0, out=left)
    np.minimum(left, np.maximum(limit - generated, 1.0)[:, None], out=left)
    return left, weights


def equiprobable(tokens: FloatArray, weights: FloatArray) -> FloatArray:
    """Returns 32 equiprobable points, shape (32,), of a law given by rising points, shape (k,), and weights."""
    below = np.cumsum(weights)
    points: FloatArray = tokens[np.searchsorted(below, LEVELS * below[-1])]
    return points


MAX_OMEGA = 0.97
STEEPNESS = 20.0


def crps(points: FloatArray, value: float) -> float:
    """Returns the continuous ranked probability score of equiprobable ``points``, in tokens; smaller is better.

    Exactly E|X - value| - E|X - X'| / 2 (Gneiting and Raftery 2007, equation 21); the second term of sorted points is
    sum_i (2 i - n + 1) x_i / n^2 with i from 0. O(n).

    Args:
        points: Not falling, shape (n,).
    """
    n = len(points)
    spread = float((2.0 * np.arange(n) - n + 1.0) @ points) / (n * n)
    return float(np.abs(points - value).mean()) - spread


class PredictorGate:
    """Computes omega, the weight of the forecast's half of a length law.

    omega = 0.97 / (1 + exp(-20 (CRPS_hist - CRPS_pred) / CRPS_hist)) over the last completions; 0.5 before there are
    enough. Cut outputs are left out: their true length is not known, and the score would favour short forecasts.

    Args:
        window: Number of completions that count.
        min_completions: With fewer completions omega is 0.5.

    Raises:
        InvalidValueError: A bound is below 1, or the window can never hold ``min_completions``.
    """

    def __init__(self, window: int = 200, min_completions: int = 20) -> None:
        if min_completions < 1:
            raise InvalidValueError("min_completions", min_completions, "an integer >= 1")
        if window < min_completions:
            raise InvalidValueError("window", window, f"an integer >= min_completions = {min_completions}")
        self._min_completions = min_completions
        self._scores: deque[tuple[float, float]] = deque(maxlen=window)
        self.omega = 0.5
        """The present weight of the forecasts."""

    def observe(self, forecast_points: FloatArray, history_points: FloatArray, output_len: int) -> None:
        """Records a job that finished by itself, with both laws as they were before it. O(window)."""
        self._scores.append((crps(forecast_points, output_len), crps(history_points, output_len)))
        if len(self._scores) < self._min_completions:
            return
        predicted, history = np.array(self._scores).mean(axis=0)
        # Against a history that is exact a forecast can at best be as good.
        gain = (history - predicted) / history if history > 0 else -float(predicted > 0)
        self.omega = MAX_OMEGA / (1.0 + float(np.exp(np.clip(-STEEPNESS * gain, -50.0, 50.0))))
