"""Forests as arrays give what the library that grew them gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from core.errors import InvalidValueError
from core.forecast import QUANTILES
from predictor.forest import MAX_POOL, Forest
from predictor.models import FULL, pack, unpack
from predictor.trainer import ForestOptions, export, fit, grow

ROWS, FEATURES = 400, 5


def data(seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    lens = np.round(np.exp(4 + features[:, 0] + 0.3 * rng.normal(size=ROWS))).astype(int)
    return features, lens, rng.normal(size=(50, FEATURES)).astype(np.float32)


@pytest.mark.parametrize("min_samples_leaf", [1, 8])
def test_quantiles_are_those_of_quantile_forest(min_samples_leaf: int) -> None:
    features, lens, asked = data()
    model = fit(features, lens, ForestOptions(20, min_samples_leaf))
    found = export(model, lens).distribution(asked, QUANTILES)
    assert found.quantiles == pytest.approx(model.predict(asked, quantiles=list(QUANTILES)), abs=1e-9)


@pytest.mark.parametrize("min_samples_leaf", [1, 5])
def test_means_are_those_of_a_random_forest(min_samples_leaf: int) -> None:
    from sklearn.ensemble import RandomForestRegressor

    features, lens, asked = data()
    forest = grow(features, lens, ForestOptions(20, min_samples_leaf, samples_per_leaf=200))
    reference = RandomForestRegressor(20, min_samples_leaf=min_samples_leaf, random_state=0).fit(features, lens)
    assert forest.distribution(asked, QUANTILES).mean == pytest.approx(reference.predict(asked))


def test_values_on_a_threshold_go_where_the_library_sends_them() -> None:
    features, lens, _ = data()
    features = np.round(features, 1)
    model = fit(features, lens, ForestOptions(10))
    thresholds = np.concatenate([each.tree_.threshold for each in model.estimators_]).astype(np.float32)
    asked = np.random.default_rng(1).choice(thresholds, (200, FEATURES))
    forest = export(model, lens)
    reached = forest.apply(asked)
    for tree, leaves in enumerate(model.apply(asked).T):
        assert forest.leaf[forest.roots[tree] + leaves].tolist() == reached[:, tree].tolist()


def test_every_forecast_is_in_order_and_within_what_was_seen() -> None:
    features, lens, asked = data()
    found = grow(features, lens, ForestOptions(10, 3)).distribution(asked * 3, QUANTILES)
    assert (np.diff(found.quantiles, axis=1) >= 0).all()
    for values in (found.quantiles, found.mean):
        assert lens.min() <= values.min() and values.max() <= lens.max()
    assert (found.rank > 0).all() and (found.rank < 1).all()
    assert np.corrcoef(found.rank, found.mean)[0, 1] > 0.8
    assert (found.num_samples >= 10 * 3).all()


def test_rows_together_get_what_they_get_alone() -> None:
    features, lens, asked = data()
    forest = grow(features, lens, ForestOptions(10, 4))
    together = forest.distribution(asked, QUANTILES)
    for number in range(len(asked)):
        alone = forest.distribution(asked[number : number + 1], QUANTILES)
        assert alone.quantiles.tolist() == together.quantiles[number : number + 1].tolist()
        assert (alone.mean[0], alone.rank[0]) == (together.mean[number], together.rank[number])


def test_leaves_keep_no_more_than_they_may() -> None:
    features, lens, asked = data()
    forest = grow(features, lens, ForestOptions(10, 30, samples_per_leaf=4))
    assert np.diff(forest.leaf_begin).max() == 4
    assert forest.distribution(asked, QUANTILES).num_samples.tolist() == [40] * len(asked)


def test_the_same_seed_grows_the_same_forest() -> None:
    features, lens, asked = data()
    one, two, other = (
        grow(features, lens, ForestOptions(5, 30, samples_per_leaf=4, seed=seed)).distribution(asked, QUANTILES).mean
        for seed in (1, 1, 2)
    )
    assert one.tolist() == two.tolist() != other.tolist()


def test_one_length_only() -> None:
    features, _, asked = data()
    found = grow(features, np.full(ROWS, 7), ForestOptions(3)).distribution(asked, QUANTILES)
    assert (found.quantiles == 7).all() and (found.mean == 7).all()


def test_other_features_are_refused() -> None:
    features, lens, _ = data()
    forest: Forest = grow(features, lens, ForestOptions(2))
    with pytest.raises(InvalidValueError, match=r"features.*\(rows, 5\)"):
        forest.apply(np.zeros((3, 4), np.float32))


@pytest.mark.parametrize(
    "options", [{"num_trees": 0}, {"min_samples_leaf": 0}, {"samples_per_leaf": 1}, {"max_features": 0.0}]
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match=next(iter(options))):
        ForestOptions(**options)


def test_one_example_is_no_forest() -> None:
    with pytest.raises(InvalidValueError, match="at least 2"):
        grow(np.zeros((1, 2), np.float32), np.array([3]), ForestOptions())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("depth", 10**9),
        ("roots", np.array([10**6], np.int32)),
        ("roots", np.zeros(100_000, np.int32)),
        ("children", np.full((3, 2), -1, np.int32)),
        ("feature", np.full(1000, 30_000, np.int16)),
        ("leaf", np.full(1000, 10**6, np.int32)),
        ("leaf_begin", np.array([0, 1 << 40], np.int64)),
        ("leaf_mean", np.array([np.nan])),
        ("threshold", np.zeros(1, np.float32)),
    ],
)
def test_a_forest_that_lies_about_itself_is_refused(field: str, value: Any) -> None:
    """Its descents would leave the arrays, or never end; its pools would not fit the memory."""
    features, lens, _ = data()
    arrays = pack(grow(features, lens, ForestOptions(5, 3)), FULL)
    unpack(arrays, "forest", FULL)
    with pytest.raises(ValueError, match="fit together"):
        unpack(arrays | {f"{FULL}.{field}": np.asarray(value)}, "forest", FULL)


def test_a_forest_whose_every_forecast_costs_much_is_refused() -> None:
    features, lens, _ = data()
    forest = grow(features, lens, ForestOptions(5, 3))
    begin = np.arange(len(forest.leaf_begin)) * MAX_POOL
    samples = np.broadcast_to(np.int32(7), (int(begin[-1]),))
    with pytest.raises(ValueError, match="outputs at most"):
        dataclasses.replace(forest, leaf_begin=begin, samples=samples).check()
