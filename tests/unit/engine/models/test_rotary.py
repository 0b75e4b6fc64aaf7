"""The tables of the rotary embedding against those of transformers: every kind of scaling, number by number."""

from __future__ import annotations

import json

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
