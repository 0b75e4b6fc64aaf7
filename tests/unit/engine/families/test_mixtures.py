"""What a configuration says of a mixture of experts."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.config_fields import UnsupportedModelError
from engine.checkpoint.model_config import DecoderConfig, load_model_config
from engine.checkpoint.names import active_parameters, num_parameters
from engine.kv.kv_pool import KVPool


def load(folder: Path, architecture: str, **fields: Any) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **fields}))
    return load_model_config(folder)


def test_total_and_active_parameters_are_those_that_are_published(tmp_path: Path) -> None:
    """Mixtral 8x7B: 46.7 billion, of which a token takes 12.9."""
    config = load(tmp_path, "MixtralForCausalLM")
    assert num_parameters(config) == 46_702_792_704
    assert round(active_parameters(config) / 1e9, 1) == 12.9


@pytest.mark.parametrize(
    ("architecture", "fields", "total", "active"),
    [
        ("GptOssForCausalLM", {"num_hidden_layers": 24, "num_local_experts": 32}, 20.9, 4.2),
        ("GptOssForCausalLM", {}, 116.8, 5.7),
        ("DeepseekV3ForCausalLM", {}, 671.0, 37.6),
    ],
)
def test_parameters_of_published_mixtures(
    architecture: str, fields: dict[str, int], total: float, active: float, tmp_path: Path
) -> None:
    """Billions, the embedding among the active ones: for gpt-oss, 0.6 more than published."""
    config = load(tmp_path, architecture, **fields)
    assert round(num_parameters(config) / 1e9, 1) == total
    assert round(active_parameters(config) / 1e9, 1) == active


def test_the_pool_holds_one_latent_of_a_token(tmp_path: Path) -> None:
    """DeepSeek-V3: 61 layers of 512 values and 64 turned ones; keys and values of all heads would be 71 times that."""
    config = load(tmp_path, "DeepseekV3ForCausalLM")
    assert config.kv_bytes_per_token(torch.bfloat16) == 61 * (512 + 64) * 2
    pool = KVPool(dataclasses.replace(config, num_hidden_layers=2), num_blocks=3, block_size=16, dtype=torch.bfloat16)
    assert math.prod(pool.block_shape) * pool.num_blocks * 2 == 2 * (512 + 64) * 2 * pool.num_slots
    assert pool.values[1].data_ptr() == pool.keys[1].data_ptr()


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("DeepseekV3ForCausalLM", "n_group", 7),
        ("DeepseekV3ForCausalLM", "topk_group", 9),
        ("DeepseekV3ForCausalLM", "qk_rope_head_dim", 63),
        ("DeepseekV3ForCausalLM", "scoring_func", "softmax"),
        ("DeepseekV3ForCausalLM", "first_k_dense_replace", -1),
        ("DeepseekV2ForCausalLM", "topk_method", "noaux_tc"),
        ("DeepseekV2ForCausalLM", "num_experts_per_tok", None),
        ("GptOssForCausalLM", "swiglu_limit", -7.0),
        ("GptOssForCausalLM", "sliding_window", 0),
    ],
)
def test_a_bad_field_of_a_latent_or_a_gate_is_named(
    architecture: str, field: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        load(tmp_path, architecture, **{field: value})


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
