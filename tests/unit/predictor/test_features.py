"""Group sums of embeddings, as in Magnus, §III-B."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import QUANTILES
from farsight.predictor.features import FeatureShape, compress
from farsight.predictor.linear import fit_linear
from farsight.predictor.metrics import kendall_tau
from farsight.predictor.readers import EmbeddingCache
from farsight.predictor.words import MAX_WORDS, NUM_BUCKETS, NUM_FEATURES, buckets, fit_words
from tests.unit.predictor.requests import CountingEncoder, examples, question


def test_groups_are_sums_by_the_root_of_their_size() -> None:
    assert compress(np.arange(1, 9, dtype=np.float32)[None, :], 2).tolist() == [[5.0, 13.0]]
    for num_groups, value in ((16, 6.9282), (4, 13.8564)):
        found = compress(np.ones((2, 768), np.float32), num_groups)
        assert found == pytest.approx(np.full((2, num_groups), value), abs=1e-4)
    embeddings = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    assert compress(embeddings, 8).tolist() == embeddings.tolist()
    assert compress(embeddings, 0).shape == (3, 0)
    for num_groups in (-1, 3, 9):
        with pytest.raises(InvalidValueError, match="divisor of the embedding's 8"):
            compress(embeddings, num_groups)
    for d_user, d_app, field in ((3, 4, "d_user"), (4, -1, "d_app")):
        with pytest.raises(InvalidValueError, match=field):
            FeatureShape(8, d_user, d_app)


def test_a_row_is_length_user_input_instruction() -> None:
    user, app = np.full((2, 8), 1, np.float32), np.full((2, 8), 2, np.float32)
    features = FeatureShape(8, d_user=2, d_app=1).matrix(np.array([7, 9]), user, app)
    assert features[:, 0].tolist() == [7, 9]
    assert features[0, 1:] == pytest.approx([2, 2, 16 / 8**0.5])
    assert FeatureShape(768).num_features == 21
    assert FeatureShape(8, 0, 0).matrix(np.array([7]), None, None).tolist() == [[7]]
    with pytest.raises(InvalidValueError, match="user"):
        FeatureShape(8, 2, 0).matrix(np.array([7]), None, None)
    with pytest.raises(InvalidValueError, match="app"):
        FeatureShape(8, 0, 2).matrix(np.array([7]), None, np.ones((1, 4), np.float32))


def test_serving_needs_neither_torch_nor_sklearn_to_start() -> None:
    loaded = (
        "import sys; from farsight.predictor import shedding, text_predictor; from farsight.estimator import knn;"
        "print([*sys.modules])"
    )
    modules = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout
    assert "'numpy'" in modules
    for name in ("torch", "sklearn", "scipy", "sentence_transformers"):
        assert f"'{name}'" not in modules


def test_an_instruction_is_encoded_once() -> None:
    encoder = CountingEncoder()
    cache = EmbeddingCache(encoder)
    app, user = cache.embed(["sum up", "repeat", "sum up"], ["one", "two", "three"])
    assert encoder.asked == [["sum up", "repeat", "one", "two", "three"]]
    again, _ = cache.embed(["repeat"], ["two"])
    assert encoder.asked[1:] == [["two"]]
    assert app.tolist() == CountingEncoder().encode(["sum up", "repeat", "sum up"]).tolist()
    assert user.tolist() == CountingEncoder().encode(["one", "two", "three"]).tolist()
    assert again[0].tolist() == app[1].tolist()


def test_the_one_unused_for_longest_makes_way() -> None:
    encoder = CountingEncoder()
    cache = EmbeddingCache(encoder, capacity=2)
    cache.embed(["a"], ["x"])
    cache.embed(["e"], ["x"])
    assert cache.known("a") is not None  # used again
    cache.embed(["l"], ["x"])
    assert [cache.known(each) is not None for each in "ael"] == [True, False, True]
    assert len(cache) == 2
    app, _ = cache.embed(["a", "e", "l", "n"], ["x"] * 4)
    assert app.tolist() == CountingEncoder().encode(["a", "e", "l", "n"]).tolist(), "more at once than are kept"
    assert len(cache) == 2
    app, user = cache.embed([], [])
    assert app.shape == user.shape == (0, 8)
    with pytest.raises(InvalidValueError, match="capacity"):
        EmbeddingCache(encoder, 0)


def test_words_and_pairs_whatever_their_case() -> None:
    assert len(buckets("Name two rivers!")) == 4 + 3
    assert buckets("Name TWO rivers!").tolist() == buckets("name two rivers !").tolist()
    assert buckets("a b").tolist() != buckets("b a").tolist()
    assert len(buckets("no no no no")) == 2  # "no" and "no no"
    assert buckets("").tolist() == []
    assert buckets("look ahead").tolist() == [96, 6846, 21506], "in every process, as ``hash`` of Python is not"
    assert buckets("x " * 10_000).tolist() == buckets("x x").tolist()
    assert buckets("y " + "x " * MAX_WORDS).tolist() == buckets("y " + "x " * 2 * MAX_WORDS).tolist()


def test_scores_put_requests_in_order() -> None:
    seen, unseen = examples(400), examples(200, seed=1)
    reports: list[int] = []
    lens = np.array([each.output_len for each in seen])
    scorer, own = fit_words([each.question for each in seen], lens, progress=reports.append)
    assert reports == [256, 400]
    features = scorer.features([each.question for each in unseen])
    assert features[:, 0].tolist() == [each.question.user_input_len for each in unseen]
    actual = [each.output_len for each in unseen]
    assert kendall_tau(features[:, 2], actual) > 0.8
    assert kendall_tau(own[:, 0], lens) > 0.8
    ratio = np.exp(features[:, 3]) * features[:, 0]
    assert np.abs(ratio / actual - 1).mean() < 0.25
    assert scorer.weights.shape == (2 * NUM_BUCKETS + 4, 2)
    assert np.isfinite(scorer.features([question("", "")])).all()
    assert scorer.features([]).shape == (0, NUM_FEATURES)


def test_scores_of_own_examples_do_not_know_them() -> None:
    """A text that comes once and names its own output length must not look as if that could be predicted."""
    rng = np.random.default_rng(0)
    lens = rng.integers(1, 1000, 200)
    asked = [question("say", f"unique{number}") for number in range(200)]
    scorer, own = fit_words(asked, lens)
    assert kendall_tau(scorer.features(asked)[:, 2], lens) > 0.9  # what it was fitted to, it knows
    assert abs(kendall_tau(own[:, 0], lens)) < 0.2


def test_outliers_do_not_move_it() -> None:
    """Least squares would be drawn to the tenth of outputs that are ten thousand tokens long."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(1000, 3)).astype(np.float32)
    lens = np.round(500 + 100 * features[:, 0]).astype(int)
    lens[rng.choice(1000, 100, replace=False)] = 10_000
    model = fit_linear(features, lens)
    assert model.weights == pytest.approx([100, 0, 0, 500], abs=1.5)


def test_bins_hold_equal_shares_and_give_their_own_outputs() -> None:
    features = np.arange(1000, dtype=np.float32)[:, None]
    model = fit_linear(features, np.arange(1000), num_bins=4)
    assert np.diff(model.begin).tolist() == pytest.approx([250] * 4, abs=2)
    found = model.distribution(np.array([[-50], [300], [1200]], np.float32), QUANTILES)
    assert found.mean == pytest.approx([124.5, 374.5, 874.5], abs=2)
    assert found.quantiles[1, QUANTILES.index(0.5)] == pytest.approx(374.5, abs=2)
    assert found.rank == pytest.approx([-50, 300, 1200], abs=2)
    assert (np.diff(found.quantiles, axis=1) >= 0).all()
    same = np.ones((50, 2), np.float32)  # features that never change leave one bin
    found = fit_linear(same, np.arange(50)).distribution(same[:3], QUANTILES)
    assert (found.num_samples.tolist(), found.mean.tolist()) == ([50] * 3, [24.5] * 3)
    with pytest.raises(InvalidValueError, match="at least 2"):
        fit_linear(same[:1], np.array([1]))
    with pytest.raises(InvalidValueError, match="num_bins"):
        fit_linear(same[:3], np.arange(3), 0)
    with pytest.raises(InvalidValueError, match=r"\(rows, 2\)"):
        fit_linear(same[:3], np.arange(3)).distribution(np.ones((1, 3), np.float32), QUANTILES)
