"""Forests as arrays give what the library that grew them gives."""

from __future__ import annotations

import dataclasses
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import QUANTILES
from farsight.predictor.artefact import (
    FILE_NAME,
    MAX_ARRAYS,
    MAX_UNPACKED,
    ArtefactError,
    TrainedModel,
    from_bytes,
    load,
)
from farsight.predictor.forest import MAX_POOL, Forest
from farsight.predictor.models import FULL, pack, unpack
from farsight.predictor.trainer import ForestOptions, export, fit, grow

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
    assert (grow(features, np.full(ROWS, 7), ForestOptions(3)).distribution(asked, QUANTILES).quantiles == 7).all()
    one, two, other = (grow(features, lens, ForestOptions(5, 30, samples_per_leaf=4, seed=seed)) for seed in (1, 1, 2))
    together, again = (forest.distribution(asked, QUANTILES) for forest in (one, two))
    assert together.mean.tolist() == again.mean.tolist() != other.distribution(asked, QUANTILES).mean.tolist()
    for number in range(len(asked)):
        alone = one.distribution(asked[number : number + 1], QUANTILES)
        assert alone.quantiles.tolist() == together.quantiles[number : number + 1].tolist()
        assert (alone.mean[0], alone.rank[0]) == (together.mean[number], together.rank[number])


def test_leaves_keep_no_more_than_they_may() -> None:
    features, lens, asked = data()
    forest = grow(features, lens, ForestOptions(10, 30, samples_per_leaf=4))
    assert np.diff(forest.leaf_begin).max() == 4
    assert forest.distribution(asked, QUANTILES).num_samples.tolist() == [40] * len(asked)
    begin = np.arange(len(forest.leaf_begin)) * MAX_POOL
    samples = np.broadcast_to(np.int32(7), (int(begin[-1]),))
    with pytest.raises(ValueError, match="outputs at most"):
        dataclasses.replace(forest, leaf_begin=begin, samples=samples).check()


def test_what_makes_no_forest_or_is_not_its_features_is_refused() -> None:
    features, lens, _ = data()
    for options in ({"num_trees": 0}, {"min_samples_leaf": 0}, {"samples_per_leaf": 1}, {"max_features": 0.0}):
        with pytest.raises(InvalidValueError, match=next(iter(options))):
            ForestOptions(**options)
    with pytest.raises(InvalidValueError, match="at least 2"):
        grow(features[:1], lens[:1], ForestOptions())
    forest: Forest = grow(features, lens, ForestOptions(2))
    with pytest.raises(InvalidValueError, match=r"features.*\(rows, 5\)"):
        forest.apply(np.zeros((3, 4), np.float32))


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


ARTEFACT = TrainedModel(
    {"version": 3, "model": "forest", "share": 0.5}, {"a": np.arange(6).reshape(2, 3), "b": np.ones(4, np.float32)}
)
DATA = ARTEFACT.to_bytes()


def test_round_trip(tmp_path: Path) -> None:
    assert ARTEFACT.save(tmp_path / "new" / "dir") == tmp_path / "new" / "dir" / FILE_NAME
    for path in (tmp_path / "new" / "dir", tmp_path / "new" / "dir" / FILE_NAME):
        found = load(path)
        assert found.metadata == ARTEFACT.metadata
        assert found.arrays.keys() == ARTEFACT.arrays.keys()
        for name, array in ARTEFACT.arrays.items():
            assert found.arrays[name].dtype == array.dtype
            assert found.arrays[name].tolist() == array.tolist()
    assert [each.name for each in (tmp_path / "new" / "dir").iterdir()] == [FILE_NAME]


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_a_changed_byte_never_changes_what_is_served(place: int, change: int) -> None:
    data = bytearray(DATA)
    data[place] ^= change
    try:
        found = from_bytes(bytes(data))
    except ArtefactError:
        return  # a zip has bytes that mean nothing; a change there may go unseen
    assert found.metadata == ARTEFACT.metadata
    assert all(found.arrays[name].tolist() == array.tolist() for name, array in ARTEFACT.arrays.items())


def test_arrays_of_another_training_are_seen_by_the_checksum() -> None:
    other = TrainedModel(ARTEFACT.metadata, {**ARTEFACT.arrays, "b": np.zeros(4, np.float32)}).to_bytes()
    buffer = io.BytesIO()
    ours, theirs = zipfile.ZipFile(io.BytesIO(DATA)), zipfile.ZipFile(io.BytesIO(other))
    with ours, theirs, zipfile.ZipFile(buffer, "w") as mixed:
        for name in ours.namelist():
            mixed.writestr(name, (theirs if name == "b.npy" else ours).read(name))
    with pytest.raises(ArtefactError, match="checksum"):
        from_bytes(buffer.getvalue())


@pytest.mark.parametrize(
    ("metadata", "array", "words"),
    [
        ('{"format": 99}', np.ones(2), "format 99, but this Farsight reads 1"),
        ('{"format": 1}', np.array([{"x": 1}], dtype=object), "no forecast artefact"),  # no object is unpickled
    ],
)
def test_another_format_is_refused(metadata: str, array: np.ndarray, words: str) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, a=array)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("metadata.json", metadata)
    with pytest.raises(ArtefactError, match=words):
        from_bytes(buffer.getvalue())


def test_what_is_not_there_or_cut_off_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"forecaster.npz: cannot be read .*farsight train"):
        load(tmp_path)
    for length in (0, 10, len(DATA) // 2, len(DATA) - 1):
        with pytest.raises(ArtefactError, match=r"from the store: no forecast artefact, or cut off .* train it again"):
            from_bytes(DATA[:length], "from the store")


@pytest.mark.parametrize("size", [MAX_UNPACKED + 1, 1 << 40])
def test_a_file_that_unpacks_to_more_than_fits_is_not_unpacked(size: int) -> None:
    """The directory of a zip says how much it holds; what lies about that is cut off by the reader of zips."""
    data = bytearray(DATA)
    at = data.rindex(b"PK\x01\x02")
    data[at + 24 : at + 28] = min(size, 0xFFFFFFFE).to_bytes(4, "little")
    with pytest.raises(ArtefactError, match="bytes; at most"):
        from_bytes(bytes(data))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number in range(MAX_ARRAYS + 1):
            archive.writestr(f"{number}.npy", b"")
    with pytest.raises(ArtefactError, match="arrays of 0 bytes"):
        from_bytes(buffer.getvalue())
