"""Multi-Bin's regressor: one linear head over an encoder, least absolute error, binned afterwards (App. C.1).

The paper trains the encoder with the head. Here the encoder stays as it is, and the input's length is a feature beside
its vectors, because a vector hardly tells the length. The training outputs that fall into a bin are its distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farsight.core.errors import InvalidValueError
from farsight.predictor.features import Floats
from farsight.predictor.forest import LengthDistributions, linear_quantiles

NUM_BINS = 32
"""Number of bins of equal mass: the most that the paper tries."""

_RIDGE = 1e-3
"""Share of a unit that is added to each feature's variance: keeps the least squares solvable."""

_ROUNDS = 25
"""Rounds of reweighting; the error moves by less than 0.1 % after the first 15."""


@dataclass(frozen=True, slots=True)
class BinnedLinear:
    """A linear score in tokens, and the outputs of training examples with similar scores.

    Attributes:
        weights: (features + 1,), the last one is the constant.
        edges: (bins - 1,), scores between neighbouring bins, rising.
        begin: (bins + 1,), where a bin's outputs begin in ``samples``.
        samples: Output lengths in tokens, each bin's in order.
    """

    weights: NDArray[np.float64]
    edges: NDArray[np.float64]
    begin: NDArray[np.int64]
    samples: NDArray[np.int32]

    def check(self) -> None:
        """
        Raises:
            ValueError: Arrays that do not fit together.
        """
        bounds = np.concatenate([[0], self.begin, [len(self.samples)]])
        fits = len(self.begin) == len(self.edges) + 2 and bool((np.diff(bounds) >= 0).all())
        if not fits or not np.isfinite(self.weights).all():
            raise ValueError("a linear model whose arrays fit together")

    def distribution(self, features: Floats, levels: Sequence[float]) -> LengthDistributions:
        """Returns the distribution of each row's bin; ``rank`` is the score. O(rows · features).

        Raises:
            InvalidValueError: another number of features.
        """
        if features.ndim != 2 or features.shape[1] != len(self.weights) - 1:
            raise InvalidValueError("features", features.shape, f"(rows, {len(self.weights) - 1})")
        scores = features @ self.weights[:-1] + self.weights[-1]
        bins = np.searchsorted(self.edges, scores, "right")
        counts = np.diff(self.begin)
        means = np.add.reduceat(self.samples.astype(np.float64), self.begin[:-1]) / counts
        quantiles = linear_quantiles(self.samples, self.begin[bins], counts[bins], levels)
        return LengthDistributions(means[bins], quantiles, scores, counts[bins])


def fit_linear(features: Floats, output_lens: NDArray[np.integer], num_bins: int = NUM_BINS) -> BinnedLinear:
    """Minimises the absolute error by reweighted least squares.

    Args:
        features: (rows, features).
        output_lens: (rows,), in tokens.
        num_bins: Bins of equal mass, at least 1; fewer where scores are equal.

    Returns:
        O(rounds · rows · features²) time.

    Raises:
        InvalidValueError: fewer than 2 rows or no bin.
    """
    if len(output_lens) < 2:
        raise InvalidValueError("output_lens", len(output_lens), "at least 2 examples")
    if num_bins < 1:
        raise InvalidValueError("num_bins", num_bins, "an integer >= 1")
    target = np.asarray(output_lens, np.float64)
    centre, spread = features.mean(axis=0, dtype=np.float64), features.std(axis=0, dtype=np.float64)
    spread[spread == 0] = 1.0
    design = np.concatenate([(features - centre) / spread, np.ones((len(target), 1))], axis=1)
    weights = _least_absolute(design, target)
    slopes = weights[:-1] / spread
    weights = np.append(slopes, weights[-1] - centre @ slopes)
    scores = features @ weights[:-1] + weights[-1]
    edges = np.unique(np.quantile(scores, np.arange(1, num_bins) / num_bins))
    bins = np.searchsorted(edges, scores, "right")
    filled, bins = np.unique(bins, return_inverse=True)
    edges = edges[filled[1:] - 1]  # an empty bin joins the one before it
    order = np.lexsort((target, bins))
    begin = np.searchsorted(bins[order], np.arange(len(filled) + 1))
    return BinnedLinear(weights, edges, begin.astype(np.int64), np.asarray(output_lens, np.int32)[order])


def _least_absolute(design: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solves reweighted least squares: a row weighs the inverse of its last residual, taken as at least one token."""
    row_weights = np.ones(len(target))
    ridge = np.eye(design.shape[1]) * _RIDGE * len(target)
    ridge[-1, -1] = 0.0
    solution = np.zeros(design.shape[1])
    for _ in range(_ROUNDS):
        weighted = design * row_weights[:, None]
        solution = np.linalg.solve(design.T @ weighted + ridge * row_weights.mean(), weighted.T @ target)
        row_weights = 1.0 / np.maximum(np.abs(target - design @ solution), 1.0)
    return solution
