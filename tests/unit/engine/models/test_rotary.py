"""The tables of the rotary embedding against those of transformers: every kind of scaling, number by number."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from engine.checkpoint.model_config import load_model_config
from engine.models.rotary import rotary_tables

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
LONG = {"short_factor": [1.0 + i / 7 for i in range(12)], "long_factor": [9.0] * 12}
KINDS = {
    "plain": ("LlamaForCausalLM", {"rope_type": "default", "rope_theta": 5e5}),
    "linear": ("LlamaForCausalLM", {"rope_type": "linear", "factor": 3.0}),
    "llama3": ("LlamaForCausalLM", {"rope_type": "llama3", **LLAMA3}),
    "yarn": ("LlamaForCausalLM", {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}),
    "yarn with its own numbers": (
        "LlamaForCausalLM",
        {
            "rope_type": "yarn",
            "factor": 3.0,
            "beta_fast": 9.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
            "truncate": False,
            "original_max_position_embeddings": 512,
        },
    ),
    "partial": ("Phi3ForCausalLM", {"rope_type": "default", "partial_rotary_factor": 0.75}),
    "longrope": ("Phi3ForCausalLM", {"rope_type": "longrope", "partial_rotary_factor": 0.75, **LONG}),
    "longrope with factor": (
        "Phi3ForCausalLM",
        {"rope_type": "longrope", "partial_rotary_factor": 0.75, **LONG, "factor": 5.0},
    ),
}
MAX_LEN = 700


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_are_those_of_transformers(kind, dtype, tmp_path):
    architecture, rope = KINDS[kind]
    fields = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 4096}
    if architecture == "Phi3ForCausalLM":
        fields["original_max_position_embeddings"] = MAX_LEN
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "rope_scaling": rope, **fields}))
    reference_config = getattr(transformers, architecture).config_class(rope_scaling=dict(rope), **fields)
    rotary_class = Phi3RotaryEmbedding if architecture == "Phi3ForCausalLM" else LlamaRotaryEmbedding
    expected = rotary_class(reference_config)(torch.empty(0, dtype=dtype), torch.arange(MAX_LEN)[None])
    rotary = load_model_config(tmp_path).rotary
    assert rotary is not None
    for ours, theirs in zip(rotary_tables(rotary, MAX_LEN, dtype), expected, strict=True):
        assert ours.shape == (MAX_LEN, rotary.rotary_dim)
        assert torch.equal(ours, theirs[0])


@pytest.mark.parametrize("length", [300, 512, 513, 2000])
def test_tables_that_grow_with_the_context_that_is_served(length, tmp_path):
    """transformers computes the same for one sequence of that length."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 5e3}
    fields: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "rope_scaling": rope, **fields})
    )
    config_class: Any = transformers.LlamaConfig
    reference_config = config_class(rope_scaling=dict(rope), **fields)
    expected = LlamaRotaryEmbedding(reference_config)(torch.empty(0), torch.arange(length)[None])
    rotary = load_model_config(tmp_path).rotary
    assert rotary is not None
    for ours, theirs in zip(rotary_tables(rotary, length, torch.float32), expected, strict=True):
        assert torch.allclose(ours, theirs[0], atol=1e-4)


@pytest.mark.parametrize("length", [500, 501])
def test_long_factors_are_those_of_a_context_beyond_the_original_one(length, tmp_path):
    rope = {"rope_type": "longrope", **LONG, "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    fields: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 4096}
    fields["original_max_position_embeddings"] = 500
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Phi3ForCausalLM"], "rope_scaling": rope, **fields})
    )
    config_class: Any = transformers.Phi3Config
    reference_config = config_class(rope_scaling=dict(rope), **fields)
    expected = Phi3RotaryEmbedding(reference_config)(torch.empty(0), torch.arange(length)[None])
    rotary = load_model_config(tmp_path).rotary
    assert rotary is not None
    for ours, theirs in zip(rotary_tables(rotary, length, torch.float32), expected, strict=True):
        assert torch.allclose(ours, theirs[0], atol=1e-5)
