"""Predictors of output lengths in a simulation: each maps arrivals to the same arrivals with ``forecast`` set.

They bracket a real predictor: the oracle is the upper bound, the shuffled one (right law, wrong request) the lower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import QUANTILES, Forecast
from farsight.simulator.traffic.workload import SimRequest

PredictLengths = Callable[[Sequence[SimRequest]], list[SimRequest]]
"""Sets the forecasts of a workload."""

_NORMAL_QUANTILES = tuple(NormalDist().inv_cdf(q) for q in QUANTILES)


def oracle(arrivals: Sequence[SimRequest]) -> list[SimRequest]:
    """Forecasts the true length with certainty. O(n)."""
    return [replace(a, forecast=certain(a.output_len)) for a in arrivals]


def history(arrivals: Sequence[SimRequest]) -> list[SimRequest]:
    """Removes forecasts, so that policies use their own window of finished requests. O(n)."""
    return [replace(a, forecast=None) for a in arrivals]


def none(arrivals: Sequence[SimRequest]) -> list[SimRequest]:
    """No information: ``num_samples`` 0 and a prior, uniform over the lengths that the request may generate. O(n)."""
    return [replace(a, forecast=_prior(a.max_new_tokens)) for a in arrivals]


@dataclass(frozen=True, slots=True)
class Noisy:
    """Log-normal noise around the true length, with quantiles as wide as the noise.

    The centre is truth·e^(sigma·z); given the centre, the truth is log-normal around it with the same sigma when all
    lengths were equally likely on a log scale beforehand. Values are kept within [1, max_new_tokens].

    Attributes:
        sigma: Standard deviation of the logarithm, at least 0; 0.5 misses by a factor of 1.65 or less in 68 %.
        seed: Random seed of the noise; the same seed gives the same forecasts on every call.
    """

    sigma: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise InvalidValueError("sigma", self.sigma, "a finite number of at least 0")

    def __call__(self, arrivals: Sequence[SimRequest]) -> list[SimRequest]:
        """O(n)."""
        noise = np.exp(self.sigma * np.random.default_rng(self.seed).standard_normal(len(arrivals)))
        return [replace(a, forecast=self._forecast(a, float(x))) for a, x in zip(arrivals, noise, strict=True)]

    def _forecast(self, arrival: SimRequest, noise: float) -> Forecast:
        centre = arrival.output_len * noise
        spread = [centre * math.exp(self.sigma * z) for z in _NORMAL_QUANTILES]
        within = [min(max(length, 1.0), float(arrival.max_new_tokens)) for length in spread]
        mean = min(max(centre * math.exp(self.sigma**2 / 2), 1.0), float(arrival.max_new_tokens))
        return Forecast(mean, tuple(within), len(QUANTILES), "noisy", 1)


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Gives each request the forecast of a random other one: the law is right, each forecast useless.

    Attributes:
        predict: The predictor whose forecasts are permuted.
        seed: Random seed of the permutation.
    """

    predict: PredictLengths = oracle
    seed: int = 0

    def __call__(self, arrivals: Sequence[SimRequest]) -> list[SimRequest]:
        """O(n)."""
        predicted = self.predict(arrivals)
        order = np.random.default_rng(self.seed).permutation(len(predicted))
        return [replace(a, forecast=predicted[int(i)].forecast) for a, i in zip(predicted, order, strict=True)]


def certain(length: float) -> Forecast:
    """Returns a forecast of this length alone."""
    return Forecast(float(length), (float(length),) * len(QUANTILES), 1, "oracle", 1)


def _prior(max_new_tokens: int) -> Forecast:
    quantiles = tuple(max(1.0, q * max_new_tokens) for q in QUANTILES)
    return Forecast((1 + max_new_tokens) / 2, quantiles, 0, "none", 0)
