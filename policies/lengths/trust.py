"""The weight of forecasts in length laws, by how much better than the history they were recently."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from core.errors import InvalidValueError

FloatArray = NDArray[np.float64]

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
