"""What a configuration says of a mixture of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from engine.checkpoint.config_fields import UnsupportedModelError
from engine.checkpoint.model_config import DecoderConfig, load_model_config
from engine.checkpoint.names import active_parameters, num_parameters
from engine.parallel.mesh import Mesh


def load(folder: Path, architecture: str, **fields: Any) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **fields}))
    return load_model_config(folder)


def test_total_and_active_parameters_are_those_that_are_published(tmp_path: Path) -> None:
    """Mixtral 8x7B: 46.7 billion, of which a token takes 12.9."""
    config = load(tmp_path, "MixtralForCausalLM")
    assert num_parameters(config) == 46_702_792_704
    assert round(active_parameters(config) / 1e9, 1) == 12.9


def test_a_dense_model_is_active_as_a_whole(tmp_path: Path) -> None:
    config = load(tmp_path, "LlamaForCausalLM")
    assert active_parameters(config) == num_parameters(config)


def test_layers_without_experts(tmp_path: Path) -> None:
    config = load(tmp_path, "Qwen2MoeForCausalLM", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert config.experts is not None
    assert config.experts.layers == (False, True, False, False, False, True)


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("MixtralForCausalLM", "num_experts_per_tok", 9),
        ("MixtralForCausalLM", "num_local_experts", 0),
        ("Qwen3MoeForCausalLM", "mlp_only_layers", [24]),
        ("Qwen3MoeForCausalLM", "decoder_sparse_step", 0),
        ("Qwen2MoeForCausalLM", "norm_topk_prob", "yes"),
        ("OlmoeForCausalLM", "clip_qkv", 8.0),
    ],
)
def test_a_bad_field_is_named(architecture: str, field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        load(tmp_path, architecture, **{field: value})


def test_several_ranks_refuse(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="computed by one rank"):
        Mesh(tensor=2).check(load(tmp_path, "MixtralForCausalLM"))
