"""Encoders and embeddings of decoders against transformers and sentence-transformers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel

from farsight.core.config.engine import EngineConfig
from farsight.core.errors import InvalidValueError
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import SamplingParams
from farsight.engine.build import check_worker
from farsight.engine.checkpoint.config_fields import CheckpointError, UnsupportedModelError
from farsight.engine.checkpoint.encoder_config import abilities_of, load_encoder_config
from farsight.engine.checkpoint.families.encoder import ENCODERS
from farsight.engine.engine import Engine
from farsight.engine.models.encoder import EncoderModel, EncoderText

_TEXTS = ([5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [20, 21, 22, 23])

_SHAPES = (
    {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2},
    {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 100, "num_hidden_layers": 1},
    {"hidden_size": 40, "num_attention_heads": 1, "intermediate_size": 64, "num_hidden_layers": 3},
)


def make_encoder(name: str, folder: Path, **changes: Any) -> torch.nn.Module:
    """Writes a random small model of a class with a tokenizer of 64 words; returns the reference."""
    torch.manual_seed(7)
    kind = getattr(transformers, name)
    config = kind.config_class(**{"vocab_size": 64, "max_position_embeddings": 40, **_SHAPES[0], **changes})
    model = kind(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():  # transformers begins biases at 0 and norms at 1
            tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="w1 $A w2", pair="w1 $A w2 $B:1 w2:1", special_tokens=[("w1", 1), ("w2", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def make_labse(folder: Path, name: str = "BertModel", **changes: Any) -> Path:
    """A random model with LaBSE's modules: the first token's state, a dense layer with tanh, length 1."""
    folder.mkdir(exist_ok=True)
    make_encoder(name, folder, **changes)
    width = changes.get("hidden_size", 32)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    tanh = "torch.nn.modules.activation.Tanh"
    settings = {
        "1_Pooling": {
            "word_embedding_dimension": width,
            "pooling_mode_cls_token": True,
            "pooling_mode_mean_tokens": False,
        },
        "2_Dense": {"in_features": width, "out_features": width, "bias": True, "activation_function": tanh},
    }
    for name, config in settings.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "3_Normalize").mkdir(exist_ok=True)
    torch.manual_seed(1)
    dense = {"linear.weight": torch.randn(width, width), "linear.bias": torch.randn(width)}
    save_file(dense, folder / "2_Dense/model.safetensors")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "w0"}')
    return folder


@pytest.mark.parametrize("shape", range(len(_SHAPES)))
@pytest.mark.parametrize("act", ["gelu", "relu", "gelu_new"])
@pytest.mark.parametrize("name", [name for name, each in ENCODERS.items() if not (each.classifier or each.only_gguf)])
def test_hidden_states_are_those_of_transformers(name: str, act: str, shape: int, tmp_path: Path) -> None:
    reference = make_encoder(name, tmp_path, hidden_act=act, **_SHAPES[shape])
    config = load_encoder_config(tmp_path)
    assert config is not None
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 6e-2)):
        model = EncoderModel.from_dir(tmp_path, config, dtype)
        found = model.hidden([EncoderText(ids) for ids in _TEXTS])
        for ids, hidden in zip(_TEXTS, found, strict=True):
            with torch.no_grad():
                expected = reference.to(dtype)(torch.tensor([ids])).last_hidden_state[0]
            torch.testing.assert_close(hidden, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("name", [name for name, record in ENCODERS.items() if record.classifier])
def test_scores_are_those_of_transformers(name: str, num_labels: int, tmp_path: Path) -> None:
    reference = make_encoder(name, tmp_path, num_labels=num_labels)
    ids, second_at = [4, 5, 6, 2, 7, 8, 9, 2], 4  # 1 pads in RoBERTa
    types = [0] * 4 + [1] * 4 if name.startswith("Bert") else [0] * 8
    with torch.no_grad():
        expected = reference(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0]
    assert abilities_of(tmp_path).num_labels == num_labels
    config = load_encoder_config(tmp_path)
    assert config is not None
    found = EncoderModel.from_dir(tmp_path, config, torch.float32).scores([EncoderText(ids, second_at)])[0]
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_layers_behind_pooling_as_in_labse(tmp_path: Path) -> None:
    import sentence_transformers

    make_labse(tmp_path)
    reference = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu", local_files_only=True)
    expected = reference.encode(["w5 w6 w7 w8", "w9"])
    abilities = abilities_of(tmp_path)
    assert (abilities.pooling, abilities.dim, abilities.normalizes) == ("cls", 32, True)
    found = torch.tensor(Engine(tmp_path).embed(["w5 w6 w7 w8", "w9"], "cls"))
    torch.testing.assert_close(torch.nn.functional.normalize(found), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_an_encoder_fails_what_it_cannot_compute_and_goes_on(tmp_path: Path) -> None:
    make_encoder("BertModel", tmp_path)
    engine = Engine(tmp_path, engine=EngineConfig(max_batch_tokens=16))
    request_id = engine.submit([5, 6], SamplingParams(4))
    deltas = []
    while not engine.idle:
        deltas += engine.step()
    assert [(d.request_id, d.finish_reason) for d in deltas] == [(request_id, "error")]
    assert "encoder" in (deltas[0].error or "")
    engine.embed([[5] * 40, [6]], "mean")  # longer than a step; as long as the model's positions
    with pytest.raises(InvalidValueError, match="max_tokens"):
        engine.embed([[5] * 41], "mean")
    engine.check_integrity()


def test_a_damaged_or_unknown_encoder_is_refused_before_it_starts(tmp_path: Path) -> None:
    make_encoder("BertModel", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def rewrite(**changes: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))

    check_worker(tmp_path, EngineConfig())
    rewrite(hidden_size=33)
    with pytest.raises(UnsupportedModelError, match="hidden_size"):
        check_worker(tmp_path, EngineConfig())
    rewrite(intermediate_size=49)
    with pytest.raises(CheckpointError, match="intermediate"):
        check_worker(tmp_path, EngineConfig())
    rewrite(position_embedding_type="relative_key")
    with pytest.raises(UnsupportedModelError, match="position_embedding_type"):
        check_worker(tmp_path, EngineConfig())
    rewrite()
    with pytest.raises(InvalidValueError, match="max_model_len"):
        check_worker(tmp_path, EngineConfig(max_model_len=41))
    (tmp_path / "modules.json").write_text('[{"type": "x.Pooling", "path": "../elsewhere"}]')
    with pytest.raises(UnsupportedModelError, match="modules"):
        check_worker(tmp_path, EngineConfig())


_PROMPTS = [[5, 9, 33], [7], list(range(20, 90)), [*range(20, 84), 4, 5], [100] * 41]


def _expected(model_dir: Path, pooling: str) -> torch.Tensor:
    reference = AutoModel.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        states = [reference(torch.tensor([ids])).last_hidden_state[0] for ids in _PROMPTS]
    return torch.stack([each.mean(0) if pooling == "mean" else each[-1] for each in states])


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("shape", ["qwen3", "gqa", "opt"])
def test_embeddings_are_those_of_transformers(
    shape: str, pooling: str, backend: str, model_dir: Callable[[str], Path]
) -> None:
    """In steps of 16 tokens, so in chunks; twice, so that the second time prefixes are cached; beside generation."""
    folder = model_dir(shape)
    settings = EngineConfig(backend=backend, max_batch_tokens=16, max_num_seqs=4, block_size=16)
    engine = Engine(folder, engine=settings)
    expected = _expected(folder, pooling)
    alone = engine.generate([[3, 4, 5]], SamplingParams(12, ignore_eos=True))[0].token_ids
    beside = engine.submit([3, 4, 5], SamplingParams(12, ignore_eos=True))
    sampling = SamplingParams(1, pooling=pooling)
    for _ in range(2):
        names = [engine.submit(prompt, sampling) for prompt in _PROMPTS]
        deltas = _run(engine)
        found = {each.request_id: each for each in deltas if each.request_id in names}
        assert all(each.finish_reason == "stop" and each.token_ids == () and each.text == "" for each in found.values())
        vectors = torch.stack([torch.frombuffer(bytearray(found[name].vector), dtype=torch.float32) for name in names])
        torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=2e-5)
        written = [token for each in deltas if each.request_id == beside for token in each.token_ids]
        assert tuple(written) in ((), alone)
    engine.check_integrity()


def test_a_preempted_mean_counts_each_position_once(model_dir: Callable[[str], Path]) -> None:
    """A pool that holds a part of what is asked for: prompts lose their KV midway and are computed again."""
    folder = model_dir("gqa")
    settings = EngineConfig(max_batch_tokens=16, block_size=16, kv_memory="40KiB", host_kv_memory="0")
    engine = Engine(folder, engine=settings)
    expected = _expected(folder, "mean")
    long = SamplingParams(40, ignore_eos=True)
    for prompt in _PROMPTS[:2]:
        engine.submit(prompt, long)
    names = [engine.submit(prompt, SamplingParams(1, pooling="mean")) for prompt in _PROMPTS]
    found = {each.request_id: each for each in _run(engine) if each.vector}
    vectors = torch.stack([torch.frombuffer(bytearray(found[name].vector), dtype=torch.float32) for name in names])
    torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=2e-5)


def _run(engine: Engine) -> list[TokenDelta]:
    deltas = []
    for _ in itertools.takewhile(lambda _: not engine.idle, itertools.count()):
        deltas += engine.step()
    return deltas
