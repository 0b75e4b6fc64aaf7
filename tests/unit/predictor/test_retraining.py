"""Training on: the same reading of requests, forests grown again, the next version."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import Example, ForecastQuestion
from farsight.predictor.artefact import TrainedModel, from_bytes
from farsight.predictor.features import Floats
from farsight.predictor.history import HistoryPredictor
from farsight.predictor.retraining import (
    MAX_FEATURES,
    Sample,
    can_be_retrained,
    feature_set,
    retrain,
    retraining,
    samples_of,
    score,
)
from farsight.predictor.shedding import Effort
from farsight.predictor.text_predictor import TextPredictor
from farsight.predictor.trainer import ForestOptions
from farsight.predictor.training import Recipe, train
from tests.unit.predictor.requests import CountingEncoder

FOREST = ForestOptions(num_trees=10, min_samples_leaf=3)
WORDS = Recipe(reads="words", d_user=None, d_app=None, forest=FOREST)


def question(number: int) -> ForecastQuestion:
    instruction = ("add", "bed")[number % 2]
    return ForecastQuestion(f"r{number}", instruction, "face " * (number % 5), number % 5, 8, 500)


def examples(scale: int = 1) -> list[Example]:
    return [Example(question(i), scale * (10 + 90 * (i % 2) + i % 5)) for i in range(80)]


@functools.cache
def trained_on_words() -> TrainedModel:
    """Trained once for all tests, which only read it."""
    return train(examples(), None, WORDS)


def forecast_of(artefact: TrainedModel, number: int, effort: Effort = Effort.FULL) -> float:
    encoder = None if "words" in artefact.arrays else CountingEncoder()
    predictor = TextPredictor(artefact, encoder, HistoryPredictor())
    predictor.forecast([question(0), question(1)])  # both instructions are known from here on
    return predictor.forecast([question(number)], effort)[0].mean


@pytest.mark.parametrize("recipe", [WORDS, Recipe(d_user=4, d_app=2, forest=FOREST)])
def test_the_next_version_says_what_the_new_samples_say(recipe: Recipe) -> None:
    first = train(examples(), CountingEncoder(), recipe)
    old = samples_of(first)
    assert [each.output_len for each in old] == [each.output_len for each in examples()]
    longer = [Sample(each.features, 3 * each.output_len) for each in old]
    second = from_bytes(retrain(retraining(first, longer)))
    assert (second.metadata["version"], second.metadata["num_examples"]) == (2, 80)
    assert feature_set(second) == feature_set(first)
    for effort in (Effort.FULL, Effort.LENGTH):
        for number in (0, 1):
            before, after = forecast_of(first, number, effort), forecast_of(second, number, effort)
            assert after == pytest.approx(3 * before, rel=0.15)
    assert score(second, longer) < score(first, longer)
    assert score(first, old) < score(second, old)


def test_other_features_and_what_is_wide_or_no_forest_cannot_be_trained_on() -> None:
    first = trained_on_words()
    task = retraining(first, samples_of(first))
    with pytest.raises(InvalidValueError, match="features"):
        retrain(replace(task, features=task.features[:, :2]))
    assert feature_set(first) != feature_set(train(examples(2), None, WORDS)), "other words"

    class Wide(CountingEncoder):
        dim = 8 * MAX_FEATURES

        def encode(self, texts: Sequence[str]) -> Floats:
            return np.tile(CountingEncoder().encode(texts), MAX_FEATURES)

    assert can_be_retrained(trained_on_words())
    assert not can_be_retrained(train(examples(), Wide(), Recipe(d_user=None, d_app=4, forest=FOREST)))
    assert not can_be_retrained(train(examples(), CountingEncoder(), Recipe("linear", d_user=None, d_app=None)))
