"""Multi-Bin's regressor: what it learns, what its artefact serves, and hostile artefacts."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from core.errors import InvalidValueError
from engine.encoders.fine_tuning import FineTuning, fine_tune
from engine.encoders.loading import text_model_of
from engine.encoders.regressor import LengthRegressor
from predictor.artefact import ArtefactError, TrainedModel, from_bytes
from predictor.encoders import Scorer
from predictor.history import HistoryPredictor
from predictor.metrics import score
from predictor.models import check_artefact
from predictor.shedding import Effort
from predictor.text_predictor import TextPredictor
from tests.unit.engine.encoders.test_encoders import make_encoder
from tests.unit.predictor.requests import examples

SEEN, UNSEEN = examples(300), examples(100, seed=1)
QUICK = FineTuning(epochs=4, max_tokens=64)


@functools.cache
def trained() -> TrainedModel:
    """Trained once for all tests, which only read it."""
    return from_bytes(fine_tune(SEEN, None, QUICK, version=3).to_bytes())


def with_array(name: str, data: bytes) -> TrainedModel:
    artefact = trained()
    return TrainedModel(artefact.metadata, {**artefact.arrays, name: np.frombuffer(data, np.uint8)})


def test_a_small_encoder_learns_from_nothing_and_serves_from_its_artefact() -> None:
    check_artefact(trained())
    predictor = TextPredictor(trained(), text_model_of(trained()), HistoryPredictor())
    forecasts = predictor.forecast([each.question for each in UNSEEN])
    found = score(forecasts, [each.output_len for each in UNSEEN])
    assert found.tau > 0.6 and found.coverage["0.9"] > 0.7
    assert {(each.source, each.version) for each in forecasts} == {("bert", 3)}
    assert {each.source for each in predictor.forecast([UNSEEN[0].question], Effort.LENGTH)} == {"history"}


def test_the_same_examples_train_the_same_regressor_and_rounding_is_stored_rounding() -> None:
    few = SEEN[:40]
    one, two = (fine_tune(few, None, FineTuning(epochs=1)) for _ in range(2))
    assert all(np.array_equal(one.arrays[name], two.arrays[name]) for name in one.arrays)
    regressor = text_model_of(one)
    assert isinstance(regressor, Scorer)
    asked = [each.question for each in few]
    together = regressor.scores(asked)
    alone = np.concatenate([regressor.scores([each]) for each in asked])
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "XLMRobertaModel"])
def test_any_encoder_can_begin(name: str, tmp_path: Path) -> None:
    make_encoder(name, tmp_path)
    artefact = fine_tune(SEEN[:40], tmp_path, FineTuning(epochs=1, max_tokens=16))
    regressor = text_model_of(artefact)
    assert isinstance(regressor, LengthRegressor)
    assert regressor.model.config.architecture == name.replace("Model", "ForSequenceClassification")
    assert np.isfinite(regressor.scores([UNSEEN[0].question])).all()
    changed = np.frombuffer((tmp_path / "model.safetensors").read_bytes(), np.uint8)
    assert changed.size != artefact.arrays["encoder.model.safetensors"].size


def test_what_cannot_begin_is_refused(tmp_path: Path) -> None:
    make_encoder("BertForSequenceClassification", tmp_path, num_labels=3)
    with pytest.raises(InvalidValueError, match=r"encoder: got 'BertForSequenceClassification'"):
        fine_tune(SEEN[:40], tmp_path, FineTuning())
    with pytest.raises(InvalidValueError, match="at least 20"):
        fine_tune(SEEN[:5], None, FineTuning())
    with pytest.raises(InvalidValueError, match="epochs"):
        FineTuning(epochs=0)


def test_hostile_artefacts_are_refused() -> None:
    """Pickles, other models, huge shapes, missing files, and numbers where bytes should be."""
    config = json.loads(trained().arrays["encoder.config.json"].tobytes())
    pickle = b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
    hostile = [
        with_array("encoder.model.safetensors", pickle),
        with_array("encoder.model.safetensors", b"\xff" * 64),
        with_array("encoder.tokenizer.json", b"{}"),
        with_array("encoder.config.json", json.dumps({**config, "hidden_size": 1 << 40}).encode()),
        with_array("encoder.config.json", json.dumps({**config, "architectures": ["BertModel"]}).encode()),
        with_array("encoder.config.json", json.dumps({**config, "vocab_size": 5}).encode()),
        TrainedModel(trained().metadata, {**trained().arrays, "encoder.config.json": np.zeros(4)}),
        TrainedModel({**trained().metadata, "max_tokens": "many"}, trained().arrays),
    ]
    for artefact in hostile:
        with pytest.raises(ArtefactError, match=r"holds no regressor .*train it again"):
            text_model_of(artefact)
    lacking = {name: array for name, array in trained().arrays.items() if name != "full.edges"}
    with pytest.raises(ArtefactError, match="lacks"):
        check_artefact(TrainedModel(trained().metadata, lacking))
