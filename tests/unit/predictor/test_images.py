"""Lengths that depend on pictures are learned, from traffic and by training; artefacts from before read as they did."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from farsight.core.codec import decode, encode
from farsight.core.forecast import Example, Forecast, ForecastQuestion, ForecastQuestions
from farsight.predictor.applications.reading import FORM_AT, NUM_FEATURES, SECRET_BYTES, raw_features
from farsight.predictor.applications.start import untrained, untrained_with_encoder
from farsight.predictor.artefact import TrainedModel, from_bytes
from farsight.predictor.features import IMAGES, NUM_IMAGE_FEATURES, image_features
from farsight.predictor.history import HistoryPredictor
from farsight.predictor.models import check_artefact
from farsight.predictor.retraining import TRAIN_FEATURES, Sample, feature_set, retrain, retraining
from farsight.predictor.shedding import Effort
from farsight.predictor.text_predictor import TextPredictor, encoder_of
from farsight.predictor.training import RECIPES, train
from farsight.predictor.words import WordScorer
from tests.unit.predictor.requests import CountingEncoder

SECRET = bytes(range(SECRET_BYTES))


def question(number: int, *image_tokens: int) -> ForecastQuestion:
    """The same words whatever the pictures."""
    text_len = 1 + number % 5
    return ForecastQuestion(
        f"r{number}",
        "describe",
        "word " * text_len,
        text_len,
        text_len + 3 + sum(image_tokens),
        4096,
        image_tokens=image_tokens,
    )


def seen(num: int = 300) -> list[Example]:
    """30 tokens for each picture, and one more for each ten tokens of pictures; 10 without any."""
    rng = np.random.default_rng(num)
    found = []
    for number in range(num):
        pictures = tuple(rng.choice((100, 1000), size=number % 4).tolist())
        length = 10 + 30 * len(pictures) + sum(pictures) / 10
        found.append(Example(question(number, *pictures), int(length * rng.uniform(0.95, 1.05))))
    return found


@functools.cache
def by_kind(kind: str) -> TrainedModel:
    """Trained once for all tests, which only read it."""
    examples = seen()
    if kind == "traffic":
        features = raw_features([each.question for each in examples], SECRET)
        samples = [Sample(row, each.output_len) for row, each in zip(features, examples, strict=True)]
        return from_bytes(retrain(retraining(untrained("w", SECRET), samples)))
    recipe = RECIPES[kind]
    recipe = replace(recipe, forest=replace(recipe.forest, num_trees=20, min_samples_leaf=5))
    recipe = recipe if recipe.d_user is None else replace(recipe, d_user=8)
    encoder = None if recipe.reads == "words" else CountingEncoder()
    return from_bytes(train(examples, encoder, recipe).to_bytes())


def forecasts(artefact: TrainedModel, *questions: ForecastQuestion, effort: Effort = Effort.FULL) -> list[Forecast]:
    encoder = None if encoder_of(artefact) is None else CountingEncoder()
    predictor = TextPredictor(artefact, encoder, HistoryPredictor())
    predictor.forecast(questions)  # instructions are known from now on
    return predictor.forecast(questions, effort)


@pytest.mark.parametrize("kind", ["traffic", *RECIPES])
def test_number_and_size_of_pictures_say_how_long_the_answer_is(kind: str) -> None:
    artefact = by_kind(kind)
    check_artefact(artefact)
    asked = [question(3), question(3, 100), question(3, 1000), question(3, 100, 100), question(3, 1000, 1000)]
    wanted = [10, 50, 140, 90, 270]
    for effort in (Effort.FULL, Effort.LENGTH):
        for found, tokens in zip(forecasts(artefact, *asked, effort=effort), wanted, strict=True):
            assert found.mean == pytest.approx(tokens, rel=0.3, abs=5), (kind, effort, tokens)


def test_pictures_are_counted_apart_from_text() -> None:
    rows = raw_features([question(3), question(3, 100, 1000)], SECRET)
    assert rows.shape == (2, NUM_FEATURES)
    images = slice(FORM_AT, FORM_AT + NUM_IMAGE_FEATURES)
    assert rows[:, images].tolist() == [[0, 0], [2, 1100]]
    assert np.delete(rows[0], images).tolist() == np.delete(rows[1], images).tolist()
    assert image_features([]).shape == (0, NUM_IMAGE_FEATURES)
    words = WordScorer(np.zeros((2 * 2**15 + 4, 2), np.float32))
    assert words.features([question(3, 100, 1000)])[0].tolist() == [4, 3, 0, 0, 2, 1100]
    sent = ForecastQuestions((question(1, 576), question(2)))
    assert decode(encode(sent), ForecastQuestions) == sent


class SixteenLetters(CountingEncoder):
    """Has as many dimensions as are kept."""

    dim = 16

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        rows = [[text.count(letter) for letter in "abcdefghilmnorst"] for text in texts]
        return np.array(rows, np.float32).reshape(-1, self.dim)


def test_what_is_learned_with_and_without_pictures_does_not_mix() -> None:
    assert "applications-5" in feature_set(untrained("w", SECRET))
    begun = untrained_with_encoder(SixteenLetters(), "w")
    assert feature_set(begun).startswith("usin-2")
    predictor = TextPredictor(begun, SixteenLetters(), HistoryPredictor())
    row = predictor.forecast_with_features([question(3, 100, 1000)])[1][0]
    assert row is not None and len(row) == begun.arrays[TRAIN_FEATURES].shape[1]
    assert row[-NUM_IMAGE_FEATURES:].tolist() == [2, 1100]


@pytest.mark.parametrize("kind", ["words", "forest", "linear"])
def test_trained_artefacts_from_before_read_as_they_did(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_before(features: np.ndarray, questions: Sequence[ForecastQuestion], *, images: bool) -> np.ndarray:
        return features

    for module in ("farsight.predictor.training", "farsight.predictor.words"):
        monkeypatch.setattr(f"{module}.with_images", as_before)
    written = by_kind.__wrapped__(kind)
    monkeypatch.undo()
    before = TrainedModel({name: value for name, value in written.metadata.items() if name != IMAGES}, written.arrays)
    check_artefact(before)
    for effort in (Effort.FULL, Effort.LENGTH):
        plain, pictured = forecasts(before, question(3), question(3, 1000), effort=effort)
        assert plain == pictured
    assert kind == "words" or feature_set(before) != feature_set(by_kind(kind))
