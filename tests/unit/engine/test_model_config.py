"""Configuration files of both transformers generations; what cannot be computed is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig as ReferenceConfig
from transformers import LlamaForCausalLM

from core.errors import InvalidValueError
from engine.model_config import UnsupportedModelError, load_model_config, resolve_model_dir

LLAMA = {"architectures": ["LlamaForCausalLM"]}


def write(path: Path, config: dict, generation: dict | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_defaults_are_those_of_transformers(tmp_path):
    config, reference = load_model_config(write(tmp_path, LLAMA)), ReferenceConfig()
    for field in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    ):  # fmt: skip
        assert getattr(config, field) == getattr(reference, field), field
    assert config.rope_theta == 10000.0
    assert config.checkpoint_dtype == "float32"
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "bfloat16"},
        {"rope_parameters": {"rope_theta": 500000, "rope_type": "default"}, "dtype": "bfloat16"},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}, "dtype": "torch.bfloat16"},
    ],
)
def test_both_spellings(fields, tmp_path):
    config = load_model_config(write(tmp_path, LLAMA | fields))
    assert (config.rope_theta, config.checkpoint_dtype) == (5e5, "bfloat16")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["MistralForCausalLM"]),
        ("architectures", None),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("quantization_config", {"bits": 4}),
        ("rope_scaling.rope_type", "llama3"),
        ("rope_scaling.type", "linear"),
        ("rope_parameters.rope_type", "yarn"),
        ("rope_parameters.partial_rotary_factor", 0.5),
        ("dtype", "float8_e4m3fn"),
        ("hidden_size", "64"),
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 5),
        ("head_dim", 7),
        ("rms_norm_eps", 0),
        ("rope_theta", -1),
        ("eos_token_id", ["</s>"]),
    ],
)
def test_refusals_name_the_field(field, value, tmp_path):
    outer, _, inner = field.partition(".")
    with pytest.raises(UnsupportedModelError) as caught:
        load_model_config(write(tmp_path, LLAMA | {outer: {inner: value} if inner else value}))
    assert caught.value.field == field.replace(".type", ".rope_type")
    assert caught.value.value == value


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": [7, 8]}, {}, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": [9, 10]}, (9, 10)),
        ({"eos_token_id": 7}, {"eos_token_id": None}, (7,)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_eos_token_ids(config, generation, expected, tmp_path):
    assert load_model_config(write(tmp_path, LLAMA | config, generation)).eos_token_ids == expected


def test_sizes(tiny_model_dir):
    config = load_model_config(tiny_model_dir)
    model = LlamaForCausalLM.from_pretrained(tiny_model_dir)
    assert config.num_parameters == model.num_parameters()
    assert config.kv_bytes_per_token(torch.bfloat16) == 2 * 2 * 2 * 16 * 2  # K and V, layers, heads, head_dim, bytes


def test_resolve_model_dir(tmp_path, monkeypatch):
    assert resolve_model_dir(str(tmp_path)) == tmp_path
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: str(tmp_path / name))
    assert resolve_model_dir("owner/name") == tmp_path / "owner" / "name"


def test_model_that_cannot_be_had(tmp_path, monkeypatch):
    def fail(name, allow_patterns):
        raise OSError("offline\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(InvalidValueError, match=r"owner/name.*hub id \(offline\)"):
        resolve_model_dir("owner/name")
    with pytest.raises(InvalidValueError, match=r"config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidValueError, match="a JSON file"):
        load_model_config(tmp_path)
