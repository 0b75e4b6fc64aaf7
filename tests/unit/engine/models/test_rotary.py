"""The tables of the rotary embedding against those of transformers: every kind of scaling, number by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.models.rotary import rotary_tables

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
LONG = {"short_factor": [1.0 + i / 7 for i in range(12)], "long_factor": [9.0] * 12}
PHI3 = {"rope_type": "longrope", "partial_rotary_factor": 0.75, **LONG}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 512}
KINDS = {
    "plain": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {**YARN, "factor": 8.0},
    "yarn with its own numbers": {
        **{**YARN, "factor": 3.0, "beta_fast": 9.0, "beta_slow": 2.0, "truncate": False},
        **{"mscale": 0.7, "mscale_all_dim": 1.1},
    },
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.75},
    "longrope": PHI3,
    "longrope with factor": {**PHI3, "factor": 5.0},
}
MAX_LEN = 700


def tables(
    folder: Path, rope: dict[str, Any], length: int, dtype: torch.dtype = torch.float32, **fields: int
) -> list[tuple[Tensor, Tensor]]:
    """Ours and those of transformers, cosines and sines."""
    own: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 4096, **fields}
    is_phi3 = "partial_rotary_factor" in rope
    architecture = "Phi3ForCausalLM" if is_phi3 else "LlamaForCausalLM"
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "rope_scaling": rope, **own}))
    reference_config = getattr(transformers, architecture).config_class(rope_scaling=dict(rope), **own)
    rotary_class = Phi3RotaryEmbedding if is_phi3 else LlamaRotaryEmbedding
    expected = rotary_class(reference_config)(torch.empty(0, dtype=dtype), torch.arange(length)[None])
    rotary = load_model_config(folder).rotary
    assert rotary is not None
    found = rotary_tables(rotary, length, dtype)
    assert all(each.shape == (length, rotary.rotary_dim) for each in found)
    return [(ours, theirs[0]) for ours, theirs in zip(found, expected, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_are_those_of_transformers(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    fields = {"original_max_position_embeddings": MAX_LEN} if "partial_rotary_factor" in KINDS[kind] else {}
    for ours, theirs in tables(tmp_path, KINDS[kind], MAX_LEN, dtype, **fields):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("length", [300, 512, 513, 2000])
def test_tables_that_grow_with_the_context_that_is_served(length: int, tmp_path: Path) -> None:
    """transformers computes the same for one sequence of that length."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 5e3}
    for ours, theirs in tables(tmp_path, rope, length, max_position_embeddings=512):
        assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("length", [500, 501])
def test_long_factors_are_those_of_a_context_beyond_the_original_one(length: int, tmp_path: Path) -> None:
    rope = {**PHI3, "rope_theta": 1e4}
    for ours, theirs in tables(tmp_path, rope, length, original_max_position_embeddings=500):
        assert torch.allclose(ours, theirs, atol=1e-5)
