"""Scores of hashed words."""

from __future__ import annotations

import numpy as np

from predictor.metrics import kendall_tau
from predictor.words import MAX_WORDS, NUM_BUCKETS, NUM_FEATURES, buckets, fit_words
from tests.unit.predictor.requests import examples, question


def test_words_and_pairs_whatever_their_case() -> None:
    assert len(buckets("Name two rivers!")) == 4 + 3
    assert buckets("Name TWO rivers!").tolist() == buckets("name two rivers !").tolist()
    assert buckets("a b").tolist() != buckets("b a").tolist()
    assert len(buckets("no no no no")) == 2  # "no" and "no no"
    assert buckets("").tolist() == []


def test_the_same_buckets_in_every_process() -> None:
    """``hash`` of Python would differ between them."""
    assert buckets("look ahead").tolist() == [96, 6846, 21506]
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


def test_scores_of_own_examples_do_not_know_them() -> None:
    """A text that comes once and names its own output length must not look as if that could be predicted."""
    rng = np.random.default_rng(0)
    lens = rng.integers(1, 1000, 200)
    asked = [question("say", f"unique{number}") for number in range(200)]
    scorer, own = fit_words(asked, lens)
    assert kendall_tau(scorer.features(asked)[:, 2], lens) > 0.9  # what it was fitted to, it knows
    assert abs(kendall_tau(own[:, 0], lens)) < 0.2


def test_an_empty_request_and_none() -> None:
    scorer, _ = fit_words([each.question for each in examples(50)], np.arange(50))
    assert scorer.weights.shape == (2 * NUM_BUCKETS + 4, 2)
    assert np.isfinite(scorer.features([question("", "")])).all()
    assert scorer.features([]).shape == (0, NUM_FEATURES)
