"""The differences between the architectures that the engine computes: one table entry each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.checkpoint.config_fields import Fields

Windows = tuple[int | None, ...]
"""By layer: the number of tokens that a token attends to, itself included; None for all."""


@dataclass(frozen=True, slots=True)
class Biases:
    """Which linear layers add a bias."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False


def _no_bias(config: Fields) -> Biases:
    return Biases()


def _optional_biases(config: Fields) -> Biases:
    attention = config.flag("attention_bias")
    return Biases(attention, attention, config.flag("mlp_bias"))


def _opt_biases(config: Fields) -> Biases:
    everywhere = config.flag("enable_bias")
    return Biases(everywhere, everywhere, everywhere)


def _full_attention(config: Fields, num_layers: int) -> Windows:
    return (None,) * num_layers


def _same_window(config: Fields, num_layers: int) -> Windows:
    return (config.size_or_none("sliding_window"),) * num_layers


def _qwen_windows(config: Fields, num_layers: int) -> Windows:
    """By ``layer_types``; where there are none, the layers from ``max_window_layers`` on slide."""
    window = config.size_or_none("sliding_window") if config.flag("use_sliding_window") else None
    types = config["layer_types"]
    if types is None:
        first = config["max_window_layers"]
        if window is not None and (type(first) is not int or first < 0):
            raise config.error("max_window_layers", "an integer >= 0")
        return tuple(None if window is None or i < first else window for i in range(num_layers))
    allowed: dict[str, int | None] = {"full_attention": None}
    if window is not None:
        allowed["sliding_attention"] = window
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in allowed for kind in types):
        raise config.error("layer_types", f"{num_layers} times {' or '.join(allowed)}")
    return tuple(allowed[kind] for kind in types)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture.

    Attributes:
        defaults: Defaults of the fields of its ``config.json``, as in transformers.
        fixed: Fields for which the engine computes only one value. A missing field or null is fine.
        spelled: Our names of fields that it names differently.
        rope_kinds: The ``rope_type`` values that are computed; none: positions are learned.
        partial_rotary: Whether a part of each head can stay unrotated.
    """

    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    spelled: Mapping[str, str] = field(default_factory=dict)
    biases: Callable[[Fields], Biases] = _no_bias
    windows: Callable[[Fields, int], Windows] = _full_attention
    norm: Literal["rms", "layer"] = "rms"
    activations: tuple[Literal["silu", "relu", "gelu"], ...] = ("silu",)
    qk_norm: bool = False
    rope_kinds: tuple[str, ...] = ("default", "linear", "llama3")
    partial_rotary: bool = False


_COMMON = {
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
_LLAMA = _COMMON | {
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL = _COMMON | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN2 = _COMMON | {
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
_PHI3 = _COMMON | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
}
_OPT = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "enable_bias": True,
    "_remove_final_layer_norm": False,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(_LLAMA, biases=_optional_biases, fixed={"layer_types": None}),
    "MistralForCausalLM": Architecture(_MISTRAL, windows=_same_window, fixed=_NO_BIAS | {"layer_types": None}),
    "Qwen2ForCausalLM": Architecture(
        _QWEN2, biases=lambda config: Biases(qkv=True), windows=_qwen_windows, fixed={"mlp_bias": False}
    ),
    "Qwen3ForCausalLM": Architecture(
        _QWEN3,
        biases=_optional_biases,
        windows=_qwen_windows,
        fixed={"mlp_bias": False},
        qk_norm=True,
    ),
    "Phi3ForCausalLM": Architecture(
        _PHI3,
        windows=_same_window,
        fixed=_NO_BIAS | {"lm_head_bias": False, "layer_types": None},
        rope_kinds=("default", "longrope"),
        partial_rotary=True,
    ),
    "OPTForCausalLM": Architecture(
        _OPT,
        biases=_opt_biases,
        fixed={"do_layer_norm_before": True, "layer_norm_elementwise_affine": True},
        spelled={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        norm="layer",
        activations=("relu", "gelu"),
        rope_kinds=(),
    ),
}
"""Architectures by their name in ``config.json``."""
