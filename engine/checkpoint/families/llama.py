"""Families built like Llama: RMS norms, a gated MLP, rotary embeddings, grouped queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farsight.engine.checkpoint.config_fields import Fields
from farsight.engine.checkpoint.families.record import (
    NEW,
    ROPE_KINDS,
    Architecture,
    Biases,
    Blocks,
    Evidence,
    QueryScale,
    TensorNames,
    Windows,
    same_window,
    windows_by_type,
)
from farsight.engine.checkpoint.rotary_config import RotaryConfig, read_rotary


def optional_biases(config: Fields) -> Biases:
    attention = config.flag("attention_bias")
    return Biases(attention, attention, config.flag("mlp_bias"))


def _qwen_windows(config: Fields, num_layers: int) -> Windows:
    """By ``layer_types``; where there are none, the layers from ``max_window_layers`` on slide."""
    window = config.size_or_none("sliding_window") if config.flag("use_sliding_window") else None
    types: list[str] = []
    if config["layer_types"] is None:
        first = config["max_window_layers"]
        if window is not None and (type(first) is not int or first < 0):
            raise config.error("max_window_layers", "an integer >= 0")
        slides = [window is not None and i >= first for i in range(num_layers)]
        types = ["sliding_attention" if each else "full_attention" for each in slides]
    return windows_by_type(config, num_layers, types, window)


def _turned_layers(config: Fields, num_layers: int) -> list[bool]:
    """Returns the layers of SmolLM3 that turn queries and keys."""
    given = config["no_rope_layers"]
    if given is None:
        interval = config.size("no_rope_layer_interval")
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers or not all(each in (0, 1) for each in given):
        raise config.error("no_rope_layers", f"{num_layers} times 0 or 1")
    return [bool(each) for each in given]


def _smollm_windows(config: Fields, num_layers: int) -> Windows:
    window = config.size_or_none("sliding_window") if config.flag("use_sliding_window") else None
    turned = _turned_layers(config, num_layers)
    types = ["full_attention" if each or window is None else "sliding_attention" for each in turned]
    return windows_by_type(config, num_layers, types, window)


def _smollm_rotaries(config: Fields, head_dim: int, windows: Windows) -> tuple[RotaryConfig | None, ...]:
    rotary = read_rotary(config, head_dim, ROPE_KINDS, partial=False)
    return tuple(rotary if turned else None for turned in _turned_layers(config, len(windows)))


def rope_of(config: Fields, kind: str) -> Fields:
    """Returns the configuration with the rotary fields of layers of this kind, where each kind has some of its own."""
    nested = config["rope_parameters"]
    if isinstance(nested, dict) and ("full_attention" in nested or "sliding_attention" in nested):
        return config.having({"rope_parameters": nested.get(kind), "rope_scaling": None})
    return config


def _olmo3_windows(config: Fields, num_layers: int) -> Windows:
    types = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(num_layers)]
    return windows_by_type(config, num_layers, types, config.size("sliding_window"))


def _olmo3_rotaries(config: Fields, head_dim: int, windows: Windows) -> tuple[RotaryConfig | None, ...]:
    """Layers that slide are not scaled, unless a scaling is given for them."""
    local = rope_of(config, "sliding_attention")
    if local is config:
        rope = config["rope_parameters"]
        plain = {"rope_theta": rope["rope_theta"]} if isinstance(rope, dict) and "rope_theta" in rope else rope
        local = config.having({"rope_scaling": None, "rope_parameters": plain})
    full = read_rotary(rope_of(config, "full_attention"), head_dim, ROPE_KINDS, partial=False)
    sliding = read_rotary(local, head_dim, ROPE_KINDS, partial=False)
    return tuple(full if window is None else sliding for window in windows)


def _ministral3(config: Fields) -> Mapping[str, Any]:
    """Takes the scale of queries out of the rotary fields, whose object says it."""
    rope = config["rope_parameters"]
    if rope is None:
        rope = _MINISTRAL3_YARN
    if not isinstance(rope, dict):
        raise config.error("rope_parameters", "an object")
    inner = Fields(rope, {}, "rope_parameters.")
    if not rope.get("llama_4_scaling_beta"):
        return {"rope_parameters": rope}
    scale = QueryScale(inner.positive("llama_4_scaling_beta"), inner.size("original_max_position_embeddings"))
    kept = {name: value for name, value in rope.items() if name not in ("llama_4_scaling_beta", _CONTEXT)}
    return {"rope_parameters": kept, "query_scale": scale}


def _ministral3_blocks(config: Fields) -> Blocks:
    return Blocks(query_scale=config["query_scale"])


def _ernie_biases(config: Fields) -> Biases:
    return Biases(*(config.flag("use_bias"),) * 3)


_CONTEXT = "max_position_embeddings"

COMMON = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_LLAMA = COMMON | {
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL = COMMON | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN2 = COMMON | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "eos_token_id": None,
}
_QWEN3 = _QWEN2 | {"head_dim": 128, "attention_bias": False, "mlp_bias": False}
_PHI3 = COMMON | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
}
_SMOLLM3 = COMMON | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
    "use_sliding_window": False,
    "no_rope_layer_interval": 4,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 128001,
}
_GRANITE = _LLAMA | {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
_OLMO2 = _LLAMA | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
_OLMO3 = _OLMO2 | {"rope_theta": 500000.0, "sliding_window": 4096}
_MINISTRAL3 = COMMON | {
    "vocab_size": 131072,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "head_dim": 128,
    _CONTEXT: 262144,
    "rms_norm_eps": 1e-5,
}
_MINISTRAL3_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
ERNIE = COMMON | {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    _CONTEXT: 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "use_bias": False,
    "tie_word_embeddings": True,
}
_GLM = COMMON | {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_GLM_NAMES = TensorNames(
    up=("mlp.gate_up_proj",),
    after_attention="post_self_attn_layernorm",
    after_mlp="post_mlp_layernorm",
    interleaved=True,
)


def granite_blocks(config: Fields) -> Blocks:
    return Blocks(
        embedding_scale=config.positive("embedding_multiplier"),
        residual_scale=config.positive("residual_multiplier"),
        attention_scale=config.positive("attention_multiplier"),
        logit_scale=1.0 / config.positive("logits_scaling"),
    )


def _qkv_bias(config: Fields) -> Biases:
    return Biases(qkv=config.flag("attention_bias"))


LLAMA_LIKE: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        _LLAMA,
        Evidence("Llama 2 and 3, Vicuna, SmolLM2, Yi, and others"),
        biases=optional_biases,
        fixed={"layer_types": None},
    ),
    "MistralForCausalLM": Architecture(
        _MISTRAL,
        Evidence("Mistral, with and without windows"),
        windows=same_window,
        fixed=_NO_BIAS | {"layer_types": None},
    ),
    "Qwen2ForCausalLM": Architecture(
        _QWEN2,
        Evidence("Qwen 2 and 2.5"),
        biases=Biases(qkv=True),
        windows=_qwen_windows,
        fixed={"mlp_bias": False},
    ),
    "Qwen3ForCausalLM": Architecture(
        _QWEN3,
        Evidence("Qwen 3 (dense)"),
        biases=optional_biases,
        windows=_qwen_windows,
        fixed={"mlp_bias": False},
        blocks=Blocks(head_norm="each"),
    ),
    "Phi3ForCausalLM": Architecture(
        _PHI3,
        Evidence("Phi-3, Phi-3.5-mini, Phi-4"),
        windows=same_window,
        fixed=_NO_BIAS | {"lm_head_bias": False, "layer_types": None},
        rope_kinds=("default", "longrope"),
        partial_rotary=True,
        names=TensorNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    ),
    "SmolLM3ForCausalLM": Architecture(
        _SMOLLM3,
        Evidence("SmolLM3 (every fourth layer without positions)"),
        biases=optional_biases,
        windows=_smollm_windows,
        rotaries=_smollm_rotaries,
    ),
    "GraniteForCausalLM": Architecture(
        _GRANITE, Evidence("Granite 3 (dense)"), biases=optional_biases, blocks=granite_blocks
    ),
    "Olmo2ForCausalLM": Architecture(
        _OLMO2,
        Evidence("OLMo 2"),
        biases=optional_biases,
        fixed={"mlp_bias": False},
        blocks=Blocks(norm_before=False, norm_after=True, head_norm="all"),
    ),
    "Olmo3ForCausalLM": Architecture(
        _OLMO3,
        Evidence("OLMo 3", date=NEW),
        biases=optional_biases,
        fixed={"mlp_bias": False},
        windows=_olmo3_windows,
        rotaries=_olmo3_rotaries,
        blocks=Blocks(norm_before=False, norm_after=True, head_norm="all"),
    ),
    "Ministral3ForCausalLM": Architecture(
        _MINISTRAL3,
        Evidence("Ministral 3 (text)", date=NEW),
        derived=_ministral3,
        windows=same_window,
        fixed=_NO_BIAS | {"layer_types": None},
        blocks=_ministral3_blocks,
    ),
    "Ernie4_5ForCausalLM": Architecture(
        ERNIE, Evidence("ERNIE 4.5 0.3B", date=NEW), biases=_ernie_biases, names=TensorNames(interleaved=True)
    ),
    "GlmForCausalLM": Architecture(
        _GLM, Evidence("GLM-4-9B (converted)"), biases=_qkv_bias, partial_rotary=True, names=_GLM_NAMES
    ),
    "Glm4ForCausalLM": Architecture(
        _GLM,
        Evidence("GLM-4-0414"),
        biases=_qkv_bias,
        partial_rotary=True,
        names=_GLM_NAMES,
        blocks=Blocks(norm_after=True),
    ),
}
