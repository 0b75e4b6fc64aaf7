"""Arrival times of requests: instants in seconds from the start, not falling.

FastServe section 6 sweeps Gamma arrivals by rate and coefficient of variation; Multi-Bin assumes Poisson.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from farsight.core.errors import InvalidValueError

Instants = NDArray[np.float64]


class ArrivalProcess(Protocol):
    """Draws arrival times."""

    def sample(self, rng: np.random.Generator, num_requests: int) -> Instants:
        """That many instants in seconds, not falling."""
        ...


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps drawn from a Gamma law with shape 1/cv² and scale cv²/rate: mean 1/rate, bursts grow with ``cv``.

    Attributes:
        rate: Requests per second, above 0.
        cv: Standard deviation of the gaps over their mean, above 0; 1 is Poisson.
    """

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _positive("rate", self.rate)
        _positive("cv", self.cv)

    def sample(self, rng: np.random.Generator, num_requests: int) -> Instants:
        """O(num_requests); the first request arrives after one gap."""
        variance = self.cv * self.cv
        return np.cumsum(rng.gamma(1.0 / variance, variance / self.rate, num_requests))


@dataclass(frozen=True, slots=True)
class Poisson:
    """Exponential gaps of mean 1/rate; ``rate`` in requests per second, above 0."""

    rate: float

    def __post_init__(self) -> None:
        _positive("rate", self.rate)

    def sample(self, rng: np.random.Generator, num_requests: int) -> Instants:
        """O(num_requests); the first request arrives after one gap."""
        return np.cumsum(rng.exponential(1.0 / self.rate, num_requests))


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """Every request arrives at the start."""

    def sample(self, rng: np.random.Generator, num_requests: int) -> Instants:
        """O(num_requests); draws nothing."""
        return np.zeros(num_requests)


def rescale(instants: Sequence[float] | Instants, rate: float) -> Instants:
    """Stretches or shrinks time so that the mean gap becomes 1/rate; the shape of the bursts stays. O(n).

    Raises:
        InvalidValueError: A rate of 0 or less, instants that fall or that span no time.
    """
    _positive("rate", rate)
    times = _from_zero(instants)
    if len(times) < 2 or times[-1] == 0:
        raise InvalidValueError("instants", f"{len(times)} at one instant", "a trace that spans some time")
    stretched: Instants = times * ((len(times) - 1) / (rate * times[-1]))
    return stretched


def debatch(instants: Sequence[float] | Instants) -> Instants:
    """Spreads requests of one instant evenly over the gap to the next instant. O(n).

    Mooncake's time stamps are rounded to batches about 3 s apart, which would look like bursts. The last batch takes
    the gap before it; a trace with a single instant stays as it is.
    """
    times = np.asarray(_ordered(instants))
    batches, first, sizes = np.unique(times, return_index=True, return_counts=True)
    if len(batches) < 2:
        return times
    gaps = np.diff(batches)
    gaps = np.append(gaps, gaps[-1])
    place = np.arange(len(times)) - np.repeat(first, sizes)
    spread: Instants = times + place * np.repeat(gaps / sizes, sizes)
    return spread


def _from_zero(instants: Sequence[float] | Instants) -> Instants:
    times = _ordered(instants)
    return times - times[0] if len(times) else times


def _ordered(instants: Sequence[float] | Instants) -> Instants:
    times = np.asarray(instants, dtype=np.float64)
    if not np.isfinite(times).all() or (np.diff(times) < 0).any():
        raise InvalidValueError("instants", list(times[:8]), "finite seconds that do not fall")
    return times


def _positive(field: str, value: float) -> None:
    if not (np.isfinite(value) and value > 0):
        raise InvalidValueError(field, value, "a finite number above 0")
