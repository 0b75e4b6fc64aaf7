"""What Multi-Bin batching promises: service time, throughput and latency with k bins (sections 4, 5 and A.4).

One server, Poisson arrivals, batches of B from one of k bins of equal mass, a batch takes as long as its longest
member. Service times are in seconds (or any other unit of time), throughput in requests per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from core.errors import InvalidValueError
from policies.batching.multi_bin import log_chain


@dataclass(frozen=True, slots=True)
class UniformService:
    """Service times of U(low_s, high_s) and batches of ``batch_size``.

    With m the mean of one service time and a = B/(B+1) l_max + 1/(B+1) l_min that of the longest of B.
    """

    low_s: float
    high_s: float
    batch_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.low_s < math.inf:
            raise InvalidValueError("low_s", self.low_s, "0 or more")
        if not self.low_s <= self.high_s < math.inf or self.high_s == 0:
            raise InvalidValueError("high_s", self.high_s, "above 0, low_s or more")
        if self.batch_size < 1:
            raise InvalidValueError("batch_size", self.batch_size, "1 or more")

    @property
    def mean_s(self) -> float:
        """m."""
        return (self.low_s + self.high_s) / 2

    @property
    def longest_s(self) -> float:
        """a, the expected service time of a batch without bins."""
        return (self.batch_size * self.high_s + self.low_s) / (self.batch_size + 1)

    @property
    def max_throughput(self) -> float:
        """Eq. (5), c_max = B/m: as many bins as there are lengths."""
        return self.batch_size / self.mean_s

    def service_s(self, num_bins: int) -> float:
        """Theorem 4.2: the expected service time of a batch, m + (a - m)/k."""
        _check_bins(num_bins)
        return self.mean_s + (self.longest_s - self.mean_s) / num_bins

    def throughput(self, num_bins: int) -> float:
        """Eq. (4), c(k) = B / service time; rises with k."""
        return self.batch_size / self.service_s(num_bins)

    def bins_needed(self, short_by: float) -> int:
        """Theorem 4.3, eq. (6): the fewest bins with a throughput of c_max less ``short_by`` (epsilon) or more."""
        if not short_by > 0:
            raise InvalidValueError("short_by", short_by, "above 0")
        wanted = self.max_throughput - short_by
        return max(1, math.ceil(wanted * (self.longest_s - self.mean_s) / (short_by * self.mean_s)))

    def latency_s(self, num_bins: int, rate: float) -> float:
        """Lemma 5.1, eq. (7): expected latency where a server is always free.

        The service time and the wait for company, (B - 1) k / (2 rate): the bin fills at a k-th of the rate of arrival.
        """
        if not rate > 0:
            raise InvalidValueError("rate", rate, "above 0")
        return self.service_s(num_bins) + (self.batch_size - 1) * num_bins / (2 * rate)

    def service_with_errors_s(self, num_bins: int, error_rate: float) -> float:
        """Expected service time where a request is put into each neighbouring bin with ``error_rate`` (section 6.2).

        A request of the first or the last bin has one neighbour, so it errs half as often. The batch of predicted bin j
        takes the longest of B draws from its mixture F_j: E = l_min + integral of 1 - F_j(x)^B.
        """
        mass = _confusion(num_bins, error_rate)
        width_s = (self.high_s - self.low_s) / num_bins
        service_s = 0.0
        # What comes in over an edge equals what goes out over it, so every predicted bin still holds a k-th of all.
        for column in mass.T:
            levels = [0.0, *(float(each) for each in np.cumsum(column))]
            powers = sum(_mean_power(low, high, self.batch_size) for low, high in pairwise(levels))
            service_s += (self.high_s - width_s * powers) / num_bins
        return service_s


def exponential_service_bound_s(rate: float, batch_size: int, num_bins: int) -> float:
    """Bound on the expected service time of a batch, service times of Exp(rate), bins of Lemma A.1: L_k / rate.

    The bound of A.4, sum of Pr(bin i) l_i and of the last bin l_{k-1} + H_B / rate, comes to this at its minimum.
    """
    if not rate > 0:
        raise InvalidValueError("rate", rate, "above 0")
    return log_chain(batch_size, num_bins)[-1] / rate


def exponential_throughput_bound(rate: float, batch_size: int, num_bins: int) -> float:
    """Throughput that these bins reach at least: B rate / L_k."""
    return batch_size / exponential_service_bound_s(rate, batch_size, num_bins)


def _confusion(num_bins: int, error_rate: float) -> NDArray[np.float64]:
    """Row: true bin; column: bin that was predicted."""
    _check_bins(num_bins)
    if not 0 <= error_rate <= 0.5:
        raise InvalidValueError("error_rate", error_rate, "within [0, 0.5]")
    matrix = np.zeros((num_bins, num_bins))
    for index in range(num_bins):
        for neighbour in (index - 1, index + 1):
            if 0 <= neighbour < num_bins:
                matrix[index, neighbour] = error_rate
        matrix[index, index] = 1 - matrix[index].sum()
    return matrix


def _mean_power(low: float, high: float, exponent: int) -> float:
    """Mean of u^exponent over u in [low, high]."""
    if high == low:
        return low**exponent
    return float((high ** (exponent + 1) - low ** (exponent + 1)) / ((exponent + 1) * (high - low)))


def _check_bins(num_bins: int) -> None:
    if num_bins < 1:
        raise InvalidValueError("num_bins", num_bins, "1 or more")
