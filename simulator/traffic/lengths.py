"""Laws of prompt and output lengths: whole tokens, at least 1, each law with its exact mean.

The published laws are named at the end. Laws marked FITTED stand in for data sets that are not at hand: they match
the published figures named beside them and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from farsight.core.errors import InvalidValueError

Lengths = NDArray[np.int64]


class LengthLaw(Protocol):
    """A law of lengths in tokens."""

    @property
    def mean(self) -> float:
        """Expected length in tokens, after rounding and capping."""
        ...

    @property
    def longest(self) -> int:
        """The upper bound of samples."""
        ...

    def sample(self, rng: np.random.Generator, num: int) -> Lengths:
        """Draws ``num`` independent lengths, each at least 1."""
        ...


def _whole(values: NDArray[np.float64], longest: int) -> Lengths:
    return np.clip(np.ceil(values), 1, longest).astype(np.int64)


def _at_least_1(field: str, value: int) -> None:
    if value < 1:
        raise InvalidValueError(field, value, "at least 1")


def _positive(field: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidValueError(field, value, "a finite number above 0")


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole number from ``shortest`` to ``longest``, both included; O(num)."""

    shortest: int
    longest: int

    def __post_init__(self) -> None:
        _at_least_1("shortest", self.shortest)
        if self.longest < self.shortest:
            raise InvalidValueError("longest", self.longest, f"at least shortest, {self.shortest}")

    @property
    def mean(self) -> float:
        return (self.shortest + self.longest) / 2

    def sample(self, rng: np.random.Generator, num: int) -> Lengths:
        return rng.integers(self.shortest, self.longest, num, endpoint=True)


class ZipfLengths:
    """P(n) proportional to n^-theta for n = 1 … longest (FastServe section 6, which leaves the bound open).

    A smaller ``theta`` means longer lengths. O(longest) to build, O(num·log longest) to sample.
    """

    def __init__(self, theta: float, longest: int) -> None:
        _at_least_1("longest", longest)
        if not math.isfinite(theta):
            raise InvalidValueError("theta", theta, "a finite number")
        self.theta = theta
        self.longest = longest
        weights = np.arange(1, longest + 1, dtype=np.float64) ** -theta
        self._shares = weights / weights.sum()
        self._cumulative = np.cumsum(self._shares)

    @property
    def mean(self) -> float:
        return float(self._shares @ np.arange(1, self.longest + 1))

    def sample(self, rng: np.random.Generator, num: int) -> Lengths:
        found = np.searchsorted(self._cumulative, rng.random(num), side="right")
        # The cumulative shares end at 1 only up to rounding.
        return np.minimum(found + 1, self.longest).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Exponential:
    """An exponential of mean ``scale`` tokens, rounded up and cut at ``longest``; O(num)."""

    scale: float
    longest: int

    def __post_init__(self) -> None:
        _positive("scale", self.scale)
        _at_least_1("longest", self.longest)

    @property
    def mean(self) -> float:
        """Σ P(X > k) for k < longest, a geometric series."""
        return math.expm1(-self.longest / self.scale) / math.expm1(-1.0 / self.scale)

    def sample(self, rng: np.random.Generator, num: int) -> Lengths:
        return _whole(rng.exponential(self.scale, num), self.longest)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal of mean ``scale`` tokens and spread ``sigma`` of the logarithm, rounded up and cut; O(num)."""

    scale: float
    sigma: float
    longest: int

    def __post_init__(self) -> None:
        _positive("scale", self.scale)
        _positive("sigma", self.sigma)
        _at_least_1("longest", self.longest)

    @property
    def mean(self) -> float:
        """Σ P(X > k) for k < longest; O(longest)."""
        width = self.sigma * math.sqrt(2)
        tail = (math.erfc((math.log(k) - self._log_median) / width) / 2 for k in range(1, self.longest))
        return 1.0 + sum(tail)

    def sample(self, rng: np.random.Generator, num: int) -> Lengths:
        return _whole(rng.lognormal(self._log_median, self.sigma, num), self.longest)

    @property
    def _log_median(self) -> float:
        return math.log(self.scale) - self.sigma**2 / 2


@dataclass(frozen=True, slots=True)
class LengthPair:
    """Prompt and output lengths, drawn independently.

    Attributes:
        max_new_tokens: The client's limit, which policies may see.
        fitted: Whether it stands in for an unavailable data set.
    """

    prompt: LengthLaw
    output: LengthLaw
    max_new_tokens: int
    fitted: bool = False


# Past-Future, section 5.1: "32-4k/2k-4k, 3k-5k/3k-5k, and 2k-4k/32-4k". Table 1 fits D2 = U[3000, 5000] better than
# U[3072, 5120].
D1 = LengthPair(Uniform(32, 4096), Uniform(2048, 4096), 4096)
D2 = LengthPair(Uniform(3000, 5000), Uniform(3000, 5000), 5000)
D3 = LengthPair(Uniform(2048, 4096), Uniform(32, 4096), 4096)

# FITTED to Multi-Bin, Figure 6 (Phi-3.5-mini on GSM8K): with 8 servers and batches of 8, a log-normal service time of
# mean 1.553 s and sigma 0.47 gives the six published thresholds within 1.1 %; at the 0.0366 s per token of Figure 5
# the mean is 42.4 tokens. Prompts: assumed; the experiment does not depend on them.
GSM8K_LIKE = LengthPair(LogNormal(60, 0.4, 256), LogNormal(42.4, 0.47, 1024), 1024, fitted=True)

# FITTED to the means that vLLM reports for ShareGPT (SOSP 2023, Figure 11: 161 and 338 tokens; cited from memory);
# the spreads are assumed.
SHAREGPT_LIKE = LengthPair(LogNormal(161, 1.2, 2048), LogNormal(338, 0.9, 2048), 2048, fitted=True)
