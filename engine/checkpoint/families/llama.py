"""Families built like Llama: RMS norms, a gated MLP, rotary embeddings, grouped queries."""

from __future__ import annotations

from collections.abc import Mapping

from farsight.engine.checkpoint.config_fields import Fields
from farsight.engine.checkpoint.families.record import (
    ROPE_KINDS,
    Architecture,
    Biases,
    Blocks,
    Evidence,
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
    """The layers of SmolLM3 that turn queries and keys."""
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
