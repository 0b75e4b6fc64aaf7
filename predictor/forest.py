"""A forest of regression trees as plain arrays, served without the library that grew it.

Every leaf keeps the output lengths of training examples that fell into it. A forecast pools those of the leaves that a
request falls into, one a tree: quantiles of the pool (Meinshausen, *Quantile Regression Forests*, JMLR 2006, as the
package ``quantile-forest`` counts them), and the mean of the leaves' means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.errors import InvalidValueError
from predictor.features import Floats
from predictor.quantiles import LengthDistributions, linear_quantiles


@dataclass(frozen=True, slots=True)
class Forest:
    """Nodes of all trees, one after the other; a leaf's children are the leaf itself.

    Attributes:
        roots: (trees,), each tree's first node.
        depth: Depth of the deepest leaf: so many descents reach all leaves.
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

    def apply(self, features: Floats) -> NDArray[np.int32]:
        """The leaf that each row falls into in each tree.

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
        """Mean, quantiles and rank of each row from one descent. O(rows · (trees · depth + pool · log pool))."""
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
