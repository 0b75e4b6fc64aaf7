"""The simplest forecast: the next output will be like the last ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import QUANTILES, Forecast, ForecastQuestion

PRIOR_MEAN = 256.0
"""Expected output length, in tokens, before any request has finished."""

SOURCE = "history"


class HistoryPredictor:
    """Keeps the lengths of the last outputs and forecasts their distribution.

    Before the first output it gives a prior: the exponential distribution of mean ``PRIOR_MEAN``, which assumes
    nothing but a mean. The prior is too wide to be trusted, and is marked by ``num_samples == 0``.

    Args:
        window: How many output lengths are kept, at least 1.

    Raises:
        InvalidValueError: a window below 1.
    """

    def __init__(self, window: int = 1000) -> None:
        if window < 1:
            raise InvalidValueError("window", window, "an integer >= 1")
        self._lengths: deque[int] = deque(maxlen=window)
        self._version = 0
        self._forecast = _prior()

    def current(self) -> Forecast:
        """Returns mean and quantiles (linear between neighbours) of the window, in tokens, for any request. O(1)."""
        return self._forecast

    def forecast(self, questions: Sequence[ForecastQuestion]) -> list[Forecast]:
        """Returns ``current`` for each question, whatever it is."""
        return [self._forecast] * len(questions)

    def clear(self) -> None:
        """Forgets all that it has learned."""
        self._lengths.clear()
        self._version += 1
        self._forecast = _prior()

    def learn(self, output_lens: Sequence[int]) -> None:
        """Adds output lengths in tokens, oldest first. With nothing to add, the version stays."""
        if not output_lens:
            return
        self._lengths.extend(output_lens)
        self._version += 1
        # Computed here and not in current(): forecasts are asked for at every request, learning is rarer.
        lengths = np.array(self._lengths, dtype=np.float64)
        quantiles = tuple(float(each) for each in np.quantile(lengths, QUANTILES))
        self._forecast = Forecast(float(lengths.mean()), quantiles, len(lengths), SOURCE, self._version)


def _prior() -> Forecast:
    quantiles = tuple(-PRIOR_MEAN * math.log(1 - level) for level in QUANTILES)
    return Forecast(PRIOR_MEAN, quantiles, 0, SOURCE, 0)
