"""The experiments of Multi-Bin batching (arXiv 2412.04504), each as one function.

Times of service are drawn in seconds and served as whole steps of ``TICK_S``. Where a figure depends on what is not
at hand, one choice is made for the whole figure:

- Figures 6 and 7: GSM8K answers are ``GSM8K_LIKE``, fitted to the six thresholds of Figure 6, so that these test the
  batcher and the law together; Figure 7 is then not fitted. A step costs the 0.0366 s of Figure 5.
- C.1: the spread of the answers of LMSYS-Chat is set so that the oracle gains the reported 45 % with 4 bins; the
  predictor is the published accuracies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from farsight.core.costs import StepCost
from farsight.core.errors import InvalidValueError
from farsight.policies.batching.multi_bin import (
    MultiBinBatcher,
    exponential_edges,
    log_chain,
    sample_edges,
    uniform_edges,
)
from farsight.simulator.cluster.latency import GPUS, LatencyModel, LinearLatency, ModelShape, Roofline
from farsight.simulator.predictors import certain
from farsight.simulator.traffic.arrivals import AllAtOnce, ArrivalProcess, Poisson
from farsight.simulator.traffic.lengths import GSM8K_LIKE, LogNormal
from farsight.simulator.traffic.workload import SimRequest
from lab.reproduce.padded import padded_fleet

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TICK_S = 1e-3
_TICKS = LinearLatency(StepCost(TICK_S, 0.0, 0.0, 0.0))
_TOKEN_S = 0.0366
_TOKENS = LinearLatency(StepCost(_TOKEN_S, 0.0, 0.0, 0.0))
PHI = Roofline(
    GPUS["a100-80g"], ModelShape("phi-3.5-mini", 32, 3072, 3.8e9), overhead_s=_TOKEN_S - 2 * 3.8e9 / 1.224e12
)
"""One token alone takes 0.0366 s, as measured in Figure 5; prompts and context cost what the device allows."""


@dataclass(frozen=True, slots=True)
class MultiBinOutcome:
    """Requests a second until the last is returned, and mean seconds from arrival to return."""

    throughput: float
    latency_s: float


_certain = cache(certain)
"""Many requests share a forecast."""


def serve(
    lengths: Ints,
    predicted: Ints,
    edges: Sequence[float],
    batch_size: int,
    process: ArrivalProcess,
    latency: LatencyModel,
    *,
    num_workers: int = 1,
    prompts: Ints | None = None,
    seed: int = 0,
) -> MultiBinOutcome:
    """Serves these lengths in this order, binned by what was predicted. O(n + batches^2) if they pile up."""
    instants = process.sample(np.random.default_rng(seed), len(lengths)).tolist()
    longest = int(max(lengths.max(), predicted.max()))
    prompt_lens = [1] * len(lengths) if prompts is None else prompts.tolist()
    arrivals = [
        SimRequest(str(i), at, prompt, length, longest, forecast=_certain(expected))
        for i, (at, prompt, length, expected) in enumerate(
            zip(instants, prompt_lens, lengths.tolist(), predicted.tolist(), strict=True)
        )
    ]
    done = padded_fleet(MultiBinBatcher(edges, batch_size), latency, num_workers).run(arrivals).done
    ended_at = max(record.finished_at for record in done)
    return MultiBinOutcome(len(done) / ended_at, math.fsum(record.jct_s for record in done) / len(done))


def _uniform_ticks(num: int, seed: int) -> Ints:
    return np.rint(np.random.default_rng(seed).uniform(1, 20, num) / TICK_S).astype(np.int64)


def uniform_run(num_bins: int, rate: float, num: int, num_workers: int = 1, seed: int = 3) -> MultiBinOutcome:
    """Figures 3 and 4: U(1, 20) s, batches of 128, lengths known."""
    lengths = _uniform_ticks(num, seed)
    edges = uniform_edges(1 / TICK_S, 20 / TICK_S, num_bins)
    return serve(lengths, lengths, edges, 128, Poisson(rate), _TICKS, num_workers=num_workers, seed=seed + 1)


def gsm8k_run(num_bins: int, rate: float, num: int) -> MultiBinOutcome:
    rng = np.random.default_rng(6)
    known = GSM8K_LIKE.output.sample(rng, 100_000)
    lengths = GSM8K_LIKE.output.sample(rng, num)
    edges = sample_edges(known.tolist(), num_bins)
    return serve(lengths, lengths, edges, 8, Poisson(rate), _TOKENS, num_workers=8, seed=7)


def least_latency_s(num_bins: int) -> float:
    """Returns the lowest point of the curve of mean latency over the rate of arrival."""
    return min(gsm8k_run(num_bins, rate, 8_000).latency_s for rate in (10.0, 14.0, 17.0, 20.0, 23.0, 26.0, 29.0))


def confuse(bins: Ints, matrix: Floats, rng: np.random.Generator) -> Ints:
    """A predicted bin for each true one; row: true bin, column: predicted."""
    levels = matrix.cumsum(axis=1)[:, :-1]
    predicted: Ints = (rng.random(len(bins))[:, None] > levels[bins]).sum(axis=1)
    return predicted


def neighbour_errors(num_bins: int, neighbour: float, far: float = 0.0) -> Floats:
    """Each neighbouring bin with the one probability, each bin beyond with the other."""
    matrix = np.full((num_bins, num_bins), far)
    for i in range(num_bins):
        for j in (i - 1, i + 1):
            if 0 <= j < num_bins:
                matrix[i, j] = neighbour
        matrix[i, i] = 0.0
        matrix[i, i] = 1.0 - matrix[i].sum()
    return matrix


def _midpoints(edges: Sequence[float], bins: Ints) -> Ints:
    middles = np.array([(low + high) / 2 for low, high in pairwise(edges)])
    midpoints: Ints = np.ceil(middles[bins]).astype(np.int64)
    return midpoints


def errors_run(num_bins: int, error_rate: float, num: int) -> float:
    """Returns the saturated throughput under the error model."""
    lengths = _uniform_ticks(num, 9)
    edges = uniform_edges(1 / TICK_S, 20 / TICK_S, num_bins)
    bins = np.clip(np.searchsorted(edges[1:-1], lengths, side="right"), 0, num_bins - 1)
    bins = confuse(bins, neighbour_errors(num_bins, error_rate), np.random.default_rng(10))
    return serve(lengths, _midpoints(edges, bins), edges, 128, Poisson(14.0), _TICKS, seed=11).throughput


def exponential_run(num_bins: int, rate: float, num: int) -> MultiBinOutcome:
    """Runs Figure 9: Exp(0.1) s, batches of 200, bins of Lemma A.1."""
    seconds = np.random.default_rng(11).exponential(10.0, num)
    lengths = np.maximum(1, np.rint(seconds / TICK_S)).astype(np.int64)
    edges = [edge / TICK_S for edge in exponential_edges(0.1, 200, num_bins)]
    return serve(lengths, lengths, edges, 200, Poisson(rate), _TICKS, seed=12)


ACCURACY = {2: (0.8614, 1.0), 4: (0.6297, 0.9591), 8: (0.4229, 0.7942)}
"""Share of requests put into their bin, and into it or a neighbour (Table 1 and the text)."""
_LMSYS = LogNormal(214.5, 0.485, 512)
"""FITTED: the mean answer of LMSYS-Chat-1M in tokens, and the spread with which an oracle gains 45 % with 4 bins."""
_VICUNA = Roofline(GPUS["a100-80g"], ModelShape("vicuna-13b", 40, 5120, 13e9))


def published_confusion(num_bins: int) -> Floats:
    """The symmetric matrix of equal neighbour and equal far errors that has the published accuracies."""
    exact, near = ACCURACY[num_bins]
    far = (1 - near) * num_bins / ((num_bins - 1) * (num_bins - 2)) if num_bins > 2 else 0.0
    return neighbour_errors(num_bins, (near - exact) * num_bins / (2 * (num_bins - 1)), far)


def predictor_gains(num_runs: int = 10) -> dict[tuple[int, bool], float]:
    """Returns the gain in per cent by (bins, oracle), mean of runs of 800 requests."""
    totals = dict.fromkeys([(1, True), *((k, oracle) for k in (2, 4, 8) for oracle in (True, False))], 0.0)
    for seed in range(num_runs):
        rng = np.random.default_rng(20 + seed)
        lengths, prompts = _LMSYS.sample(rng, 800), np.full(800, 70)
        for k, oracle in totals:
            edges = sample_edges(_LMSYS.sample(np.random.default_rng(19), 50_000).tolist(), k)
            bins = np.searchsorted(edges[1:-1], lengths, side="right")
            if not oracle:
                bins = confuse(bins, published_confusion(k), rng)
            predicted = _midpoints(edges, bins)
            run = serve(lengths, predicted, edges, 8, AllAtOnce(), _VICUNA, prompts=prompts)
            totals[k, oracle] += 1 / run.throughput
    base = totals.pop((1, True))
    return {key: 100 * (base / total - 1) for key, total in totals.items()}


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
        _check_bins(num_bins)
        if not 0 <= error_rate <= 0.5:
            raise InvalidValueError("error_rate", error_rate, "within [0, 0.5]")
        mass = neighbour_errors(num_bins, error_rate)
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


def _mean_power(low: float, high: float, exponent: int) -> float:
    """Mean of u^exponent over u in [low, high]."""
    if high == low:
        return low**exponent
    return float((high ** (exponent + 1) - low ** (exponent + 1)) / ((exponent + 1) * (high - low)))


def _check_bins(num_bins: int) -> None:
    if num_bins < 1:
        raise InvalidValueError("num_bins", num_bins, "1 or more")
