"""What is trained is served: by text, by length, or not at all."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from farsight.core.codec import decode, encode
from farsight.core.errors import InvalidValueError
from farsight.core.forecast import Forecast
from farsight.predictor.artefact import ArtefactError, TrainedModel, from_bytes
from farsight.predictor.encoders import PROBE_TEXT
from farsight.predictor.history import HistoryPredictor
from farsight.predictor.metrics import score
from farsight.predictor.shedding import Effort
from farsight.predictor.text_predictor import TextPredictor, encoder_of
from farsight.predictor.trainer import ForestOptions
from farsight.predictor.training import RECIPES, Recipe, train
from tests.unit.predictor.requests import CountingEncoder, examples, question

SEEN, UNSEEN = examples(300), examples(150, seed=1)
SMALL = Recipe(d_user=None, d_app=2, forest=ForestOptions(20, 5))


@functools.cache
def trained(recipe: Recipe) -> TrainedModel:
    """Trained once for all tests, which only read it."""
    recipe = replace(recipe, forest=replace(recipe.forest, num_trees=20))
    recipe = recipe if recipe.d_user is None else replace(recipe, d_user=8)
    encoder = None if recipe.reads == "words" else CountingEncoder()
    return from_bytes(train(SEEN, encoder, recipe, version=4).to_bytes())


def predictor_of(artefact: TrainedModel) -> TextPredictor:
    encoder = None if encoder_of(artefact) is None else CountingEncoder()
    return TextPredictor(artefact, encoder, HistoryPredictor())


@pytest.mark.parametrize("kind", RECIPES)
def test_every_kind_forecasts_what_it_has_not_seen(kind: str) -> None:
    predictor = predictor_of(trained(RECIPES[kind]))
    forecasts = predictor.forecast([each.question for each in UNSEEN])
    found = score(forecasts, [each.output_len for each in UNSEEN])
    assert found.tau > 0.6
    assert found.coverage["0.1"] < 0.4 < found.coverage["0.5"] + 0.1 and found.coverage["0.9"] > 0.6
    for each in forecasts:
        assert (each.source, each.version) == (RECIPES[kind].model, 4)
        assert list(each.quantiles) == sorted(each.quantiles)
        assert decode(encode(each), Forecast) == each


def test_length_reads_nothing_and_knows_instructions_it_has_met() -> None:
    encoder = CountingEncoder()
    history = HistoryPredictor()
    history.learn([5])
    predictor = TextPredictor(train(SEEN, encoder, SMALL), encoder, history)
    encoder.asked.clear()
    asked = [question("repeat", "word " * 20), question("never met", "word " * 20)]
    assert [each.source for each in predictor.forecast(asked, Effort.LENGTH)] == ["history", "history"]
    predictor.forecast(asked[:1])
    encoder.asked.clear()
    by_length = predictor.forecast([asked[1], asked[0]], Effort.LENGTH)
    assert [each.source for each in by_length] == ["history", "forest-length"]
    assert by_length[0] == history.current()
    assert 70 < by_length[1].mean < 220  # 100 long, or 200 with a word that length does not tell
    assert predictor.forecast(asked, Effort.HISTORY) == [history.current()] * 2
    assert encoder.asked == []


def test_words_need_no_encoder_and_forecast_within_the_limit() -> None:
    artefact = trained(RECIPES["words"])
    again = trained.__wrapped__(RECIPES["words"])
    assert all(np.array_equal(artefact.arrays[name], again.arrays[name]) for name in artefact.arrays)
    assert encoder_of(artefact) is None
    predictor = predictor_of(artefact)
    asked = [each.question for each in UNSEEN[:5]]
    assert predictor.forecast(asked, Effort.LENGTH) == predictor.forecast(asked)
    assert all(predictor.forecast([], effort) == [] for effort in Effort)
    (free,) = predictor.forecast([question("tell all of", "word " * 40)])
    (limited,) = predictor.forecast([question("tell all of", "word " * 40, limit=50)])
    assert free.mean > 100
    assert limited.mean == 50 and set(limited.quantiles) == {50.0}
    assert limited.rank == free.rank


def test_outputs_that_were_cut_off_are_no_targets() -> None:
    cut_off = [replace(each, output_len=1, censored=True) for each in SEEN]
    artefact = train([*SEEN, *cut_off], None, RECIPES["words"])
    assert artefact.metadata["num_examples"] == len(SEEN)
    assert min(artefact.arrays["full.samples"]) > 1
    with pytest.raises(InvalidValueError, match=r"examples: got 0, expected at least 20 .* not cut off"):
        train(cut_off, None, RECIPES["words"])


def test_each_text_is_encoded_once() -> None:
    encoder = CountingEncoder()
    reports: list[int] = []
    train([*SEEN, *SEEN], encoder, SMALL, progress=reports.append)
    texts = [text for batch in encoder.asked for text in batch if text != PROBE_TEXT]
    assert len(texts) == len(set(texts)) == reports[-1]
    assert list(map(len, texts)) == sorted(map(len, texts))


def test_an_artefact_lacks_nothing_and_its_encoder_is_the_one_of_training() -> None:
    artefact = trained(SMALL)
    for missing in ("full.roots", "length.samples"):
        arrays = {name: array for name, array in artefact.arrays.items() if name != missing}
        with pytest.raises(ArtefactError, match=f"lacks '{missing}'"):
            predictor_of(TrainedModel(artefact.metadata, arrays))
    other = CountingEncoder()
    other.name = "other"
    for encoder in (other, None):
        with pytest.raises(InvalidValueError, match=r"encoder: .*letters \(8 dimensions\), as in training"):
            TextPredictor(artefact, encoder, HistoryPredictor())
    with pytest.raises(InvalidValueError, match="encoder"):
        train(SEEN, None, SMALL)
