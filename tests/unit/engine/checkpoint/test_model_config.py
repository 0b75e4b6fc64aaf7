"""Configuration files of both transformers generations; what cannot be computed is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from farsight.core.errors import ConfigError, InvalidValueError
from farsight.engine.checkpoint.check import check_checkpoint
from farsight.engine.checkpoint.config_fields import UnsupportedModelError
from farsight.engine.checkpoint.families import ARCHITECTURES
from farsight.engine.checkpoint.model_config import (
    DecoderConfig,
    load_model_config,
    resolve_max_model_len,
    resolve_model_dir,
)
from farsight.engine.checkpoint.names import active_parameters, num_parameters, tensor_shapes
from farsight.engine.checkpoint.rotary_config import LinearScaling, Llama3Scaling, LongScaling, RotaryConfig
from farsight.engine.checkpoint.weights import allocate_weights
from farsight.engine.kv_pool import KVPool
from tests.unit.engine.small_models import SHAPES, load_reference

LLAMA = {"architectures": ["LlamaForCausalLM"]}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}


def write(path: Path, config: dict, generation: dict | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def load(path: Path, architecture: str, **fields: object) -> DecoderConfig:
    return load_model_config(write(path, {"architectures": [architecture], **fields}))


SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "sliding_window",
    "ffn_dim", "attention_bias", "mlp_bias", "hidden_act", "activation_function", "enable_bias", "eos_token_id",
    "use_sliding_window", "max_window_layers", "original_max_position_embeddings", "_remove_final_layer_norm",
    "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon",
    "use_parallel_residual", "use_bias", "bias", "multi_query", "parallel_attn", "new_decoder_architecture",
    "num_ln_in_parallel_attn", "activation", "use_qkv_bias", "hidden_activation", "rotary_dim",
    "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling",
    "embedding_multiplier", "residual_multiplier", "attention_multiplier", "no_rope_layer_interval",
)  # fmt: skip


VERIFIED = [name for name, architecture in ARCHITECTURES.items() if architecture.evidence.verified]


@pytest.mark.parametrize("architecture", VERIFIED)
def test_defaults_are_those_of_transformers(architecture, tmp_path):
    reference_config = getattr(transformers, architecture).config_class()
    reference = reference_config.to_dict()
    defaults = ARCHITECTURES[architecture].defaults
    derived = {"num_key_value_heads", "head_dim"} - set(defaults)  # as many as heads; what makes up the layer's width
    if "use_sliding_window" in defaults:
        derived.add("sliding_window")  # transformers drops that of a Qwen that does not use it
    for name in {name for name in SIZES if name in reference} - derived:
        assert defaults.get(name) == reference[name], name
    asked = {"num_experts_per_tok": 6} if reference.get("num_experts_per_tok", 6) is None else {}  # no default there
    if architecture == "Glm4MoeForCausalLM":
        asked = {"head_dim": 128}  # transformers rounds the width by heads, which no checkpoint leaves to it
    config = load(tmp_path, architecture, **asked)
    if config.latent is not None:  # one row for all heads: other heads than the file's
        return
    heads = reference_config.num_attention_heads
    kv_heads = 1 if architecture == "FalconForCausalLM" else heads  # transformers names none where there is one
    assert config.num_attention_heads == heads
    assert config.num_key_value_heads == reference.get("num_key_value_heads", kv_heads)
    head_dim = reference.get("head_dim") or asked.get("head_dim") or reference_config.hidden_size // heads
    assert config.head_dim == head_dim
    assert config.checkpoint_dtype == "float32"
    if config.rotary is not None and "rope_parameters" in reference:
        rope = reference["rope_parameters"]
        rope = rope.get("sliding_attention", rope)  # of the first layer, where layers differ
        rotary_dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        scaling = config.rotary.scaling if rope["rope_type"] == "yarn" else None  # test_rotary compares its numbers
        assert config.rotary == RotaryConfig(rotary_dim, rope["rope_theta"], scaling)


SPELLINGS: dict[str, tuple[str, list[dict[str, Any]], RotaryConfig]] = {
    "plain": (
        "LlamaForCausalLM",
        [
            {"rope_theta": 5e5, "rope_scaling": None},
            {"rope_parameters": {"rope_theta": 500000, "rope_type": "default"}},
            {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
        ],
        RotaryConfig(128, 5e5),
    ),
    "llama3": (
        "LlamaForCausalLM",
        [
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
        ],
        RotaryConfig(128, 5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
    ),
    "linear": (
        "LlamaForCausalLM",
        [
            {"rope_scaling": {"type": "linear", "factor": 4}},
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        ],
        RotaryConfig(128, 1e4, LinearScaling(4.0)),
    ),
    "partial": (
        "Phi3ForCausalLM",
        [
            {"partial_rotary_factor": 0.75},
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
        ],
        RotaryConfig(72, 1e4),
    ),
    "longrope": (
        "Phi3ForCausalLM",
        [
            {"rope_scaling": {"type": "su", **LONG}, "max_position_embeddings": 4096 * 4096},
            {"rope_parameters": {"rope_type": "longrope", **LONG, "attention_factor": 2**0.5}},
        ],
        RotaryConfig(96, 1e4, LongScaling((1.0,) * 48, 2**0.5, 4096, (2.0,) * 48)),
    ),
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_a_rotary_embedding_is_read_in_every_spelling(kind, tmp_path):
    architecture, spellings, expected = SPELLINGS[kind]
    for fields in spellings:
        assert load(tmp_path, architecture, **fields).rotary == expected


@pytest.mark.parametrize("fields", [{"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {"dtype": "torch.bfloat16"}])
def test_a_type_is_read_in_every_spelling(fields, tmp_path):
    assert load(tmp_path, "LlamaForCausalLM", **fields).checkpoint_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("LlamaForCausalLM", {}, (None, None, None)),
        ("MistralForCausalLM", {}, (4096, 4096, 4096)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None)),
        ("Phi3ForCausalLM", {"sliding_window": 2047}, (2047, 2047, 2047)),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (None, None, None)),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, (None, None, None)),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 1}, (None, 4096, 4096)),
        (
            "Qwen3ForCausalLM",
            {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (4096, None, 4096),
        ),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 3}, (None, None, None)),
    ],
)
def test_sliding_windows(architecture, fields, expected, tmp_path):
    assert load(tmp_path, architecture, num_hidden_layers=3, **fields).sliding_windows == expected


REFUSED: dict[str, list[tuple[str, Any]]] = {
    "LlamaForCausalLM": [
        ("quantization_config.quant_method", "bitsandbytes"),
        ("hidden_act", "gelu"),
        ("attention_bias", 1),
        ("layer_types", ["full_attention"] * 32),
        ("rope_parameters.rope_type", "proportional"),
        ("rope_parameters.partial_rotary_factor", 0.5),
        ("rope_parameters.mrope_section", [16, 24, 24]),
        ("rope_parameters.full_attention", {"rope_type": "default"}),
        ("rope_parameters", [1]),
        ("partial_rotary_factor", 0.5),
        ("dtype", "float8_e4m3fn"),
        ("hidden_size", "64"),
        ("hidden_size", 100),
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 5),
        ("head_dim", 7),
        ("rms_norm_eps", 0),
        ("rope_theta", -1),
        ("tie_word_embeddings", "no"),
        ("eos_token_id", ["</s>"]),
    ],
    "MistralForCausalLM": [
        ("sliding_window", 0),
        ("attention_bias", True),
        ("layer_types", ["sliding_attention"] * 32),
    ],
    "Qwen2ForCausalLM": [
        ("mlp_bias", True),
        ("layer_types", ["sliding_attention"] * 32),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["linear_attention"] * 32),
    ],
    "Qwen3ForCausalLM": [("mlp_bias", True), ("use_sliding_window", "yes")],
    "Phi3ForCausalLM": [
        ("attention_bias", True),
        ("lm_head_bias", True),
        ("rope_scaling.rope_type", "llama3"),
        ("rope_parameters.partial_rotary_factor", 1.5),
        ("partial_rotary_factor", 0.01),
    ],
    "GPT2LMHeadModel": [("scale_attn_by_inverse_layer_idx", True), ("n_embd", 0), ("activation_function", "silu")],
    "GPTJForCausalLM": [("rotary_dim", -2), ("n_inner", "x")],
    "BloomForCausalLM": [("apply_residual_connection_post_layernorm", True), ("layer_norm_epsilon", 0)],
    "FalconForCausalLM": [("alibi", True), ("multi_query", "yes")],
    "StableLmForCausalLM": [("qk_layernorm", True)],
    "PhiForCausalLM": [("qk_layernorm", True)],
    "CohereForCausalLM": [("use_qk_norm", True), ("logit_scale", 0)],
    "SmolLM3ForCausalLM": [("no_rope_layers", [1, 0]), ("no_rope_layer_interval", 0)],
    "GraniteForCausalLM": [("residual_multiplier", 0)],
    "Gemma2ForCausalLM": [
        ("use_bidirectional_attention", True),
        ("attn_logit_softcapping", -1),
        ("layer_types", ["x"]),
    ],
    "ChatGLMModel": [("add_bias_linear", True), ("multi_query_group_num", 3)],
    "QWenLMHeadModel": [("no_bias", False)],
    "DeepseekV3ForCausalLM": [
        ("n_group", 7),
        ("topk_group", 9),
        ("qk_rope_head_dim", 63),
        ("scoring_func", "softmax"),
        ("first_k_dense_replace", -1),
    ],
    "DeepseekV2ForCausalLM": [("topk_method", "noaux_tc"), ("num_experts_per_tok", None)],
    "GptOssForCausalLM": [("swiglu_limit", -7.0), ("sliding_window", 0)],
    "MixtralForCausalLM": [("num_experts_per_tok", 9), ("num_local_experts", 0)],
    "Qwen3MoeForCausalLM": [("mlp_only_layers", [24]), ("decoder_sparse_step", 0)],
    "Qwen2MoeForCausalLM": [("norm_topk_prob", "yes")],
    "OlmoeForCausalLM": [("clip_qkv", 8.0)],
    "OPTForCausalLM": [
        ("do_layer_norm_before", False),
        ("layer_norm_elementwise_affine", False),
        ("word_embed_proj_dim", 512),
        ("activation_function", "silu"),
        ("enable_bias", "yes"),
    ],
}


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [(architecture, *case) for architecture, cases in REFUSED.items() for case in cases],
)
def test_refusals_name_the_field(architecture, field, value, tmp_path):
    outer, _, inner = field.partition(".")
    with pytest.raises(UnsupportedModelError) as caught:
        load(tmp_path, architecture, **{outer: {inner: value} if inner else value})
    if field == "partial_rotary_factor" and architecture == "Phi3ForCausalLM":
        field, value = "head_dim", 96  # nothing is left to turn
    assert (caught.value.field, caught.value.value) == (field, value)


ROTARY: list[tuple[dict[str, Any], str]] = [
    ({"type": "linear"}, "factor"),
    ({"type": "linear", "factor": "2"}, "factor"),
    ({"type": "linear", "factor": 2, "attention_factor": 1.0}, "attention_factor"),
    ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor"),
    ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": None}, "high_freq_factor"),
    ({"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
    ({"rope_type": "default", "factor": 2.0}, "factor"),
    ({"rope_type": "dynamic"}, "factor"),
    ({"rope_type": "dynamic", "factor": float("inf")}, "factor"),
    ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}, "beta_fast"),
    ({"rope_type": "yarn", "factor": 4.0, "truncate": 1}, "truncate"),
    ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "rope_theta"),
    ({"type": "longrope", **LONG, "short_factor": [1.0] * 47}, "short_factor"),
    ({"type": "longrope", **LONG, "long_factor": None}, "long_factor"),
    ({"type": "longrope", **LONG, "short_factor": ["1"] * 48}, "short_factor"),
    ({"type": "longrope", **LONG, "short_mscale": 1.2}, "short_mscale"),
]


@pytest.mark.parametrize(("rope", "field"), ROTARY)
def test_refusals_within_a_rotary_embedding_name_its_field(rope, field, tmp_path):
    with pytest.raises(UnsupportedModelError) as caught:
        load(tmp_path, "Phi3ForCausalLM" if "long_factor" in rope else "LlamaForCausalLM", rope_scaling=rope)
    assert caught.value.field == f"rope_scaling.{field}"


def test_two_rotary_embeddings_are_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="rope_scaling"):
        load(tmp_path, "LlamaForCausalLM", rope_scaling={"type": "default"}, rope_parameters={"rope_theta": 5.0})


@pytest.mark.parametrize("architectures", [["MambaForCausalLM"], None, "LlamaForCausalLM", [*ARCHITECTURES], [[]]])
def test_another_architecture_is_told_all_that_are_supported(architectures, tmp_path):
    with pytest.raises(UnsupportedModelError) as caught:
        load_model_config(write(tmp_path, {"architectures": architectures}))
    assert caught.value.field == "architectures"
    assert all(name in str(caught.value) for name in ARCHITECTURES)


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


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_counted_and_named_as_they_are_filled(shape, model_dir):
    directory = model_dir(shape)
    config = load_model_config(directory)
    assert num_parameters(config) == load_reference(directory).num_parameters()
    targets = allocate_weights(config, torch.float32)[1]
    assert tensor_shapes(config) == {name: tuple(tensor.shape) for name, tensor in targets.items()}
    check_checkpoint(directory, config)


PUBLISHED: list[tuple[str, dict[str, int], float, float]] = [
    ("MixtralForCausalLM", {}, 46.7, 12.9),
    ("GptOssForCausalLM", {"num_hidden_layers": 24, "num_local_experts": 32}, 20.9, 4.2),
    ("GptOssForCausalLM", {}, 116.8, 5.7),
    ("DeepseekV3ForCausalLM", {}, 671.0, 37.6),
]
"""Billions of parameters, and of those that a token takes, the embedding among them: for gpt-oss, 0.6 more than
published."""


@pytest.mark.parametrize(("architecture", "fields", "total", "active"), PUBLISHED)
def test_parameters_of_mixtures_are_those_that_are_published(architecture, fields, total, active, tmp_path):
    config = load(tmp_path, architecture, **fields)
    assert (round(num_parameters(config) / 1e9, 1), round(active_parameters(config) / 1e9, 1)) == (total, active)


def test_a_dense_model_is_active_as_a_whole_and_a_mixture_is_counted_to_the_last_number(tmp_path):
    config = load(tmp_path, "LlamaForCausalLM")
    assert active_parameters(config) == num_parameters(config)
    assert num_parameters(load(tmp_path, "MixtralForCausalLM")) == 46_702_792_704


def test_layers_without_experts(tmp_path):
    config = load(tmp_path, "Qwen2MoeForCausalLM", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert config.experts is not None
    assert config.experts.layers == (False, True, False, False, False, True)


def test_the_pool_holds_one_latent_of_a_token(tmp_path):
    """DeepSeek-V3: 61 layers of 512 values and 64 turned ones; keys and values of all heads would be 71 times that."""
    config = load(tmp_path, "DeepseekV3ForCausalLM")
    assert config.kv_bytes_per_token(torch.bfloat16) == 61 * (512 + 64) * 2
    pool = KVPool(dataclasses.replace(config, num_hidden_layers=2), num_blocks=3, block_size=16, dtype=torch.bfloat16)
    assert math.prod(pool.block_shape) * pool.num_blocks * 2 == 2 * (512 + 64) * 2 * pool.num_slots
    assert pool.values[1].data_ptr() == pool.keys[1].data_ptr()


STRETCHED: dict[str, dict[str, Any]] = {
    "not at all": {},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "longrope": {"max_position_embeddings": 131072, "rope_scaling": {"type": "su", **LONG}},
}


@pytest.mark.parametrize(
    ("kind", "default", "most"),
    [("not at all", 2048, 2048), ("dynamic", 2048, 8192), ("yarn", 2048, 8192), ("longrope", 131072, 131072)],
)
def test_a_context_is_served_as_far_as_the_model_can_be_stretched(kind, default, most, tmp_path):
    config = load(tmp_path, "Phi3ForCausalLM" if kind == "longrope" else "LlamaForCausalLM", **STRETCHED[kind])
    assert [resolve_max_model_len(config, asked) for asked in (0, 100, most)] == [default, 100, most]
    with pytest.raises(ConfigError, match=rf"engine\.max_model_len.*{most + 1}.*{most}"):
        resolve_max_model_len(config, most + 1)


def test_resolve_model_dir(tmp_path, monkeypatch):
    assert resolve_model_dir(str(tmp_path)) == tmp_path
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: str(tmp_path / name))
    assert resolve_model_dir("owner/name") == tmp_path / "owner" / "name"


@pytest.mark.parametrize("path", ["/nonexistent", "./models/x", "~/models/x", "a/b/c"])
def test_a_path_that_does_not_exist_is_no_hub_id(path, monkeypatch):
    def asked(name, allow_patterns):
        raise AssertionError(f"the hub was asked for {name}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", asked)
    with pytest.raises(InvalidValueError, match=r"expected a model directory or GGUF file that exists.*, or a hub id$"):
        resolve_model_dir(path)


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
