"""Grows forests with ``quantile-forest`` (scikit-learn's trees) and turns them into plain arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farsight.core.errors import InvalidValueError
from farsight.predictor.features import Floats
from farsight.predictor.forest import Forest


@dataclass(frozen=True, slots=True)
class ForestOptions:
    """How a forest is grown.

    Attributes:
        num_trees: Number of trees; Magnus does not give it.
        min_samples_leaf: Examples in a leaf, at least; 1 grows trees out, as scikit-learn's default.
        max_features: Share of the features tried at a split, in (0, 1]; 1 as scikit-learn's default.
        samples_per_leaf: Outputs that a leaf keeps, at most, drawn at random from a larger one.
        log_target: Splits are chosen on the logarithm of the output length, so that long outputs do not decide alone.
        seed: The same seed and data grow the same forest.

    Raises:
        InvalidValueError: a value out of range.
    """

    num_trees: int = 100
    min_samples_leaf: int = 1
    max_features: float = 1.0
    samples_per_leaf: int = 32
    log_target: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_trees", 1), ("min_samples_leaf", 1), ("samples_per_leaf", 2)):
            if getattr(self, name) < least:
                raise InvalidValueError(name, getattr(self, name), f"an integer >= {least}")
        if not 0 < self.max_features <= 1:
            raise InvalidValueError("max_features", self.max_features, "above 0 and at most 1")


def grow(features: Floats, output_lens: NDArray[np.integer], options: ForestOptions) -> Forest:
    """Grows a forest that maps features to output lengths.

    Args:
        features: (rows, num_features).
        output_lens: (rows,), in tokens.
        options: How the forest is grown.

    Returns:
        Plain arrays. O(trees · features · rows · log² rows) time.

    Raises:
        InvalidValueError: fewer than 2 rows.
    """
    if len(output_lens) < 2:
        raise InvalidValueError("output_lens", len(output_lens), "at least 2 examples")
    return export(fit(features, output_lens, options), output_lens)


def fit(features: Floats, output_lens: NDArray[np.integer], options: ForestOptions) -> Any:
    """Fits the library's own ``RandomForestQuantileRegressor``."""
    from quantile_forest import RandomForestQuantileRegressor

    model = RandomForestQuantileRegressor(
        n_estimators=options.num_trees,
        min_samples_leaf=options.min_samples_leaf,
        max_features=options.max_features,
        max_samples_leaf=options.samples_per_leaf,
        random_state=options.seed,
        n_jobs=1,  # a server that learns while it serves has no other core to spare
    )
    target = np.log1p(output_lens) if options.log_target else np.asarray(output_lens, np.float64)
    return model.fit(np.asarray(features, np.float32), target)


def export(model: Any, output_lens: NDArray[np.integer]) -> Forest:
    """Turns a fitted model into plain arrays.

    Args:
        model: From ``fit``.
        output_lens: Output lengths that it was fitted to, in tokens and in the same order.
    """
    lens = np.asarray(output_lens, np.int32)
    by_length = lens[model.sorter_[:, 0]]  # the model numbers examples by falling place, from 1
    places = _places(by_length)
    members = np.asarray(model.forest_.y_train_leaves)[:, :, 0, :]  # (trees, nodes, samples_per_leaf), 0 is none
    roots, trees, leaf_counts, samples, means, ranks = [], [], [], [], [], []
    num_nodes = num_leaves = 0
    for number, estimator in enumerate(model.estimators_):
        tree = estimator.tree_
        is_leaf = tree.children_left < 0
        roots.append(num_nodes)
        trees.append(_nodes(tree, is_leaf, num_nodes, num_leaves))
        kept = members[number, : tree.node_count][is_leaf]
        counts = (kept > 0).sum(axis=1)
        chosen = kept[kept > 0] - 1
        begin = np.cumsum(counts) - counts
        samples.append(by_length[chosen])
        means.append(np.add.reduceat(by_length[chosen].astype(np.float64), begin) / counts)
        ranks.append(np.add.reduceat(places[chosen], begin) / counts)
        leaf_counts.append(counts)
        num_nodes += tree.node_count
        num_leaves += int(is_leaf.sum())
    feature, threshold, children, leaf = (np.concatenate(parts) for parts in zip(*trees, strict=True))
    return Forest(
        roots=np.array(roots, np.int32),
        depth=max(estimator.tree_.max_depth for estimator in model.estimators_),
        feature=feature.astype(np.int16),
        threshold=threshold,
        children=children.astype(np.int32),
        leaf=leaf.astype(np.int32),
        leaf_mean=np.concatenate(means),
        leaf_rank=np.concatenate(ranks).astype(np.float32),
        leaf_begin=np.concatenate([[0], np.cumsum(np.concatenate(leaf_counts))]).astype(np.int64),
        samples=np.concatenate(samples),
        num_features=int(model.n_features_in_),
    )


def _nodes(
    tree: Any, is_leaf: NDArray[np.bool_], num_nodes: int, num_leaves: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Returns feature, threshold, children and leaf number of each node; numbers continue those of earlier trees."""
    own = np.arange(tree.node_count)
    left = np.where(is_leaf, own, tree.children_left)
    right = np.where(is_leaf, own, tree.children_right)
    feature = np.where(is_leaf, 0, tree.feature)
    # For a float32 x, x <= t is the same as x <= the largest float32 that is not above t.
    threshold = tree.threshold.astype(np.float32)
    above = threshold > tree.threshold
    threshold[above] = np.nextafter(threshold[above], np.float32(-np.inf))
    leaf = np.where(is_leaf, num_leaves + np.cumsum(is_leaf) - 1, -1)
    return feature, threshold, np.stack([left, right], axis=1) + num_nodes, leaf


def _places(by_length: NDArray[np.int32]) -> NDArray[np.float64]:
    """Computes the place of each sorted length among all, in [0, 1]; equal lengths get the middle of their places."""
    below = np.searchsorted(by_length, by_length, "left")
    up_to = np.searchsorted(by_length, by_length, "right")
    places: NDArray[np.float64] = (below + up_to) / (2 * len(by_length))
    return places
