"""A forest of regression trees as plain arrays, served without the library that grew it.

Every leaf keeps the output lengths of training examples that fell into it. A request falls into one leaf of each tree,
and a forecast pools the lengths of these leaves: quantiles of the pool (Meinshausen, *Quantile Regression Forests*,
JMLR 2006, as the package ``quantile-forest`` counts them), and the mean of the leaves' means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farsight.core.errors import InvalidValueError
from farsight.predictor.features import Floats


@dataclass(frozen=True, slots=True)
class LengthDistributions:
    """Distributions of the output lengths of some requests, in tokens.

    Attributes:
        mean: (rows,).
        quantiles: (rows, levels), not falling along a row.
        rank: (rows,), orders the requests, shortest first; comparable within one model only.
        num_samples: (rows,), training outputs behind each row.
    """

    mean: NDArray[np.float64]
    quantiles: NDArray[np.float64]
    rank: NDArray[np.float64]
    num_samples: NDArray[np.int64]


def linear_quantiles(
    pool: NDArray[np.int32], begin: NDArray[np.int64], num_samples: NDArray[np.int64], levels: Sequence[float]
) -> NDArray[np.float64]:
    """Computes quantiles, linear between neighbours, of runs of ``pool``.

    Args:
        pool: Runs of outputs, each run sorted.
        begin: (rows,), where a row's run begins.
        num_samples: (rows,), the run's length, at least 1.
        levels: In [0, 1].

    Returns:
        (rows, levels). O(rows · levels).
    """
    last = (num_samples - 1)[:, None]
    place = last * np.asarray(levels)[None, :]
    low = place.astype(np.int64)
    below = pool[begin[:, None] + low].astype(np.float64)
    above = pool[begin[:, None] + np.minimum(low + 1, last)]
    found: NDArray[np.float64] = below + (place - low) * (above - below)
    return found


MAX_TREES = 10_000
MAX_DEPTH = 10_000
MAX_POOL = 1 << 20
"""Most outputs that one forecast may rest on."""


def _within(values: NDArray[Any], least: int, end: int) -> bool:
    return bool(values.min(initial=least) >= least and values.max(initial=least) < end)


@dataclass(frozen=True, slots=True)
class Forest:
    """Nodes of all trees, one after the other; a leaf's children are the leaf itself.

    Attributes:
        roots: (trees,), each tree's first node.
        depth: Depth of the deepest leaf: the number of descents that reach all leaves.
        feature: (nodes,), the feature that a node looks at; 0 in a leaf.
        threshold: (nodes,), float32: a value not above it goes left.
        children: (nodes, 2), left and right.
        leaf: (nodes,), a leaf's number, -1 inside a tree.
        leaf_mean: (leaves,), mean of its outputs, in tokens.
        leaf_rank: (leaves,), mean place of its outputs among all, in [0, 1].
        leaf_begin: (leaves + 1,), where a leaf's outputs begin in ``samples``.
        samples: Output lengths in tokens, leaf after leaf.
        num_features: Features that a row must have.
    """

    roots: NDArray[np.int32]
    depth: int
    feature: NDArray[np.int16]
    threshold: Floats
    children: NDArray[np.int32]
    leaf: NDArray[np.int32]
    leaf_mean: NDArray[np.float64]
    leaf_rank: Floats
    leaf_begin: NDArray[np.int64]
    samples: NDArray[np.int32]
    num_features: int

    def check(self) -> None:
        """
        Raises:
            ValueError: Arrays that do not fit together, or that would make a forecast cost much more than a real one.
        """
        num_nodes, num_leaves = len(self.feature), len(self.leaf_mean)
        counts = np.diff(self.leaf_begin)
        fits = (
            (1 <= len(self.roots) <= MAX_TREES and 0 <= self.depth <= MAX_DEPTH)
            and self.children.shape == (num_nodes, 2)
            and len(self.threshold) == len(self.leaf) == num_nodes
            and len(self.leaf_rank) == num_leaves == len(counts)
            and _within(self.roots, 0, num_nodes)
            and _within(self.children, 0, num_nodes)
            and _within(self.feature, 0, self.num_features)
            and _within(self.leaf, -1, num_leaves)
            and (self.leaf_begin[0] == 0 and self.leaf_begin[-1] == len(self.samples) and counts.min() >= 1)
            and bool(np.isfinite(self.leaf_mean).all() and np.isfinite(self.leaf_rank).all())
        )
        if not fits:
            raise ValueError("a forest whose arrays fit together")
        if len(self.roots) * int(counts.max()) > MAX_POOL:
            raise ValueError(f"a forest whose forecasts rest on {MAX_POOL} outputs at most")

    def apply(self, features: Floats) -> NDArray[np.int32]:
        """Finds the leaf that each row falls into in each tree.

        Args:
            features: (rows, num_features).

        Returns:
            (rows, trees), leaf numbers. O(rows · trees · depth), a handful of numpy calls a level.

        Raises:
            InvalidValueError: another number of features.
        """
        if features.ndim != 2 or features.shape[1] != self.num_features:
            raise InvalidValueError("features", features.shape, f"(rows, {self.num_features})")
        flat = np.ascontiguousarray(features, np.float32).ravel()
        first = (np.arange(len(features)) * self.num_features)[:, None]  # each row's offset in the flat features
        children = self.children.ravel()
        node = np.repeat(self.roots[None, :], len(features), axis=0)
        for _ in range(self.depth):
            above = flat[first + self.feature[node]] > self.threshold[node]
            node = children[2 * node + above]
        return self.leaf[node]

    def distribution(self, features: Floats, levels: Sequence[float]) -> LengthDistributions:
        """Forecasts mean, quantiles and rank of each row. O(rows · (trees · depth + pool · log pool))."""
        leaves = self.apply(features)
        begin, counts = self.leaf_begin[leaves], np.diff(self.leaf_begin)[leaves]
        num_samples = counts.sum(axis=1)
        ends = np.cumsum(counts.ravel())
        # Sample i of the pool of all rows is at its leaf's beginning + i - the number of samples before that leaf.
        offsets = np.repeat(begin.ravel() - ends + counts.ravel(), counts.ravel())
        pool = self.samples[offsets + np.arange(ends[-1] if ends.size else 0)]
        row_ends = np.cumsum(num_samples)
        for row in np.split(pool, row_ends[:-1]):
            row.sort()  # a view: sorted in place
        return LengthDistributions(
            mean=self.leaf_mean[leaves].mean(axis=1),
            quantiles=linear_quantiles(pool, row_ends - num_samples, num_samples, levels),
            rank=self.leaf_rank[leaves].mean(axis=1, dtype=np.float64),
            num_samples=num_samples,
        )
