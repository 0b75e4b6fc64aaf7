"""Gemma's families, and Cohere's, whose head is scaled as well."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from farsight.engine.checkpoint.config_fields import Fields
from farsight.engine.checkpoint.families.llama import COMMON, rope_of
from farsight.engine.checkpoint.families.record import (
    NEW,
    ROPE_KINDS,
    Architecture,
    Biases,
    Blocks,
    Evidence,
    Experts,
    LayerShape,
    TensorNames,
    Windows,
    chosen_experts,
    windows_by_type,
)
from farsight.engine.checkpoint.rotary_config import RotaryConfig, read_rotary

_GEMMA = COMMON | {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": 1,
}
_GEMMA2 = {name: value for name, value in _GEMMA.items() if name != "hidden_act"} | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3 = {name: value for name, value in _GEMMA2.items() if "softcapping" not in name} | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
}
_GEMMA4 = COMMON | {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "sliding_window": 512,
    "final_logit_softcapping": None,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "eos_token_id": 1,
}
_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
_COHERE = {name: value for name, value in COMMON.items() if name != "rms_norm_eps"} | {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": 255001,
}
_COHERE2 = _COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 10000.0}
_CAUSAL = {"use_bidirectional_attention": False}
_SANDWICH = TensorNames(post_norm="pre_feedforward_layernorm")


def _attention_biases(config: Fields) -> Biases:
    attention = config.flag("attention_bias")
    return Biases(attention, attention)


def _gemma(config: Fields) -> Mapping[str, Any]:
    """Published files say ``gelu`` and mean the approximation by tanh."""
    return {"hidden_act": "gelu_pytorch_tanh"} if config["hidden_act"] == "gelu" else {}


def _gemma_blocks(config: Fields) -> Blocks:
    return Blocks(norm_offset=1.0, embedding_scale=math.sqrt(config.size("hidden_size")))


def _cap(config: Fields, name: str) -> float | None:
    return None if config[name] is None else config.positive(name)


def _sandwich_blocks(config: Fields) -> Blocks:
    return Blocks(
        norm_after=True,
        norm_offset=1.0,
        embedding_scale=math.sqrt(config.size("hidden_size")),
        attention_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        attention_cap=_cap(config, "attn_logit_softcapping"),
        logit_cap=_cap(config, "final_logit_softcapping"),
    )


def _gemma3_blocks(config: Fields) -> Blocks:
    sandwich = _sandwich_blocks(config)
    return Blocks(
        norm_after=True,
        norm_offset=1.0,
        head_norm="each",
        embedding_scale=sandwich.embedding_scale,
        attention_scale=sandwich.attention_scale,
        attention_cap=sandwich.attention_cap,
        logit_cap=sandwich.logit_cap,
    )


def _patterned(config: Fields, num_layers: int, period: int) -> Windows:
    """All layers but each ``period``-th slide."""
    types = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]
    return windows_by_type(config, num_layers, types, config.size("sliding_window"))


def _gemma2_windows(config: Fields, num_layers: int) -> Windows:
    return _patterned(config, num_layers, 2)


def _pattern_windows(config: Fields, num_layers: int) -> Windows:
    return _patterned(config, num_layers, config.size("sliding_window_pattern"))


def _gemma3_rotaries(config: Fields, head_dim: int, windows: Windows) -> tuple[RotaryConfig | None, ...]:
    """Layers that slide have a base of their own, and no scaling unless it is given for them."""
    nested = config["rope_parameters"]
    if isinstance(nested, dict) and ("full_attention" in nested or "sliding_attention" in nested):
        whole = config.having({"rope_parameters": nested.get("full_attention")})
        local: dict[str, Any] = {"rope_parameters": nested.get("sliding_attention")}
    else:
        whole, local = config, {"rope_parameters": None}
    local |= {"rope_scaling": None, "rope_theta": config["rope_local_base_freq"]}
    full = read_rotary(whole, head_dim, ROPE_KINDS, partial=False)
    sliding = read_rotary(config.having(local), head_dim, ROPE_KINDS, partial=False)
    return tuple(full if window is None else sliding for window in windows)


def _gemma4(config: Fields) -> Mapping[str, Any]:
    """Lets the last layer attend to all tokens; embeddings of layers have the model's vocabulary."""
    found: dict[str, Any] = {}
    if config["rope_parameters"] is None:
        found["rope_parameters"] = _GEMMA4_ROPE
    width = config["hidden_size_per_layer_input"]
    if type(width) is not int or width < 0:
        raise config.error("hidden_size_per_layer_input", "an integer >= 0")
    if width and config["vocab_size_per_layer_input"] != config["vocab_size"]:
        raise config.error("vocab_size_per_layer_input", f"vocab_size ({config['vocab_size']})")
    types = config["layer_types"]
    if isinstance(types, list) and types:
        found["layer_types"] = [*types[:-1], "full_attention"]
    return found | _gemma4_global(config)


def _gemma4_global(config: Fields) -> dict[str, Any]:
    """Returns the sizes of layers that attend to all tokens: of fields, or of an object that tells them by layer."""
    heads = config.size_or_none("num_global_key_value_heads") if config.flag("attention_k_eq_v") else None
    found: dict[str, Any] = {"num_global_key_value_heads": heads or config.size("num_key_value_heads")}
    each = config["per_layer_config"]
    if each is None:
        return found
    given: list[Any] = [each[key] for key in sorted(each)] if isinstance(each, dict) and each else [None]
    allowed = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    same = all(isinstance(one, dict) and one == given[0] and one.keys() <= allowed.keys() for one in given)
    types = config["layer_types"]
    full = {str(i) for i, kind in enumerate(types) if kind == "full_attention"} if isinstance(types, list) else each
    if not same or set(each) != set(full):
        raise config.error("per_layer_config", f"the same {' and '.join(allowed)} for each layer of full_attention")
    found |= {"global_head_dim": config.size("head_dim")}
    return found | {allowed[name]: value for name, value in given[0].items()}


def _gemma4_windows(config: Fields, num_layers: int) -> Windows:
    windows = _patterned(config, num_layers, 6)
    return (*windows[:-1], None)


def _gemma4_shapes(config: Fields, num_layers: int) -> tuple[LayerShape, ...]:
    """Returns the sizes of layers, of which the last read keys and values of the last of their kind before them."""
    windows, inner = _gemma4_windows(config, num_layers), config.size("intermediate_size")
    heads, kv_heads = config.size("num_attention_heads"), config.size("num_key_value_heads")
    one_key, shared = config.flag("attention_k_eq_v"), config["num_kv_shared_layers"]
    global_heads = config.size("num_global_key_value_heads")
    if heads % global_heads:
        raise config.error("num_global_key_value_heads", f"a divisor of the {heads} attention heads")
    if type(shared) is not int or not 0 <= shared < num_layers:
        raise config.error("num_kv_shared_layers", f"an integer from 0 to {num_layers - 1}")
    own = num_layers - shared
    last = {windows[layer] is None: layer for layer in range(own)}
    if shared and not {window is None for window in windows[own:]} <= last.keys():
        raise config.error("num_kv_shared_layers", "so few that a layer of each kind keeps its own keys and values")
    wide = inner * 2 if config.flag("use_double_wide_mlp") else inner
    return tuple(
        LayerShape(
            config.size("global_head_dim") if window is None else config.size("head_dim"),
            global_heads if window is None else kv_heads,
            inner if layer < own else wide,
            None if layer < own else last[window is None],
            one_key and window is None,
        )
        for layer, window in enumerate(windows)
    )


def _gemma4_rotaries(config: Fields, head_dim: int, windows: Windows) -> tuple[RotaryConfig | None, ...]:
    kinds = (*ROPE_KINDS, "proportional")
    full = read_rotary(rope_of(config, "full_attention"), config.size("global_head_dim"), kinds, partial=False)
    sliding = read_rotary(rope_of(config, "sliding_attention"), head_dim, ROPE_KINDS, partial=False)
    return tuple(full if window is None else sliding for window in windows)


def _gemma4_blocks(config: Fields) -> Blocks:
    return Blocks(
        norm_after=True,
        norm_offset=0.0,
        head_norm="each",
        value_norm=True,
        embedding_scale=math.sqrt(config.size("hidden_size")),
        attention_scale=1.0,
        layer_inputs=config["hidden_size_per_layer_input"],
        layer_scale=True,
        logit_cap=_cap(config, "final_logit_softcapping"),
    )


def _gemma4_experts(config: Fields, num_layers: int) -> Experts | None:
    if not config.flag("enable_moe_block"):
        return None
    count, active = chosen_experts(config, "num_experts", "top_k_experts")
    return Experts(count, active, config.size("moe_intermediate_size"), (True,) * num_layers, beside=True)


def _cohere_blocks(config: Fields) -> Blocks:
    return Blocks(parallel=True, one_norm=True, norm_bias=False, logit_scale=config.positive("logit_scale"))


def _cohere2_rotaries(config: Fields, head_dim: int, windows: Windows) -> tuple[RotaryConfig | None, ...]:
    rotary = read_rotary(config, head_dim, ROPE_KINDS, partial=False)
    return tuple(None if window is None else rotary for window in windows)


def _gemma4_architecture(defaults: Mapping[str, Any], models: str) -> Architecture:
    return Architecture(
        defaults,
        Evidence(models, date=NEW),
        fixed={"use_bidirectional_attention": "vision", "attention_bias": False},
        spelled={"hidden_act": "hidden_activation"},
        derived=_gemma4,
        activations=("gelu_pytorch_tanh",),
        windows=_gemma4_windows,
        rotaries=_gemma4_rotaries,
        blocks=_gemma4_blocks,
        shapes=_gemma4_shapes,
        experts=_gemma4_experts,
        names=TensorNames(
            post_norm="pre_feedforward_layernorm",
            router="router.proj",
            expert_up=("experts.gate_up_proj",),
            expert_down="experts.down_proj",
            expert_ends=("", ""),
        ),
    )


GEMMA_LIKE: Mapping[str, Architecture] = {
    "GemmaForCausalLM": Architecture(
        _GEMMA,
        Evidence("Gemma, CodeGemma"),
        fixed=_CAUSAL,
        derived=_gemma,
        activations=("gelu_pytorch_tanh",),
        biases=_attention_biases,
        blocks=_gemma_blocks,
    ),
    "Gemma2ForCausalLM": Architecture(
        _GEMMA2,
        Evidence("Gemma 2"),
        fixed=_CAUSAL,
        spelled={"hidden_act": "hidden_activation"},
        activations=("gelu_pytorch_tanh",),
        biases=_attention_biases,
        windows=_gemma2_windows,
        blocks=_sandwich_blocks,
        names=_SANDWICH,
    ),
    "Gemma3ForCausalLM": Architecture(
        _GEMMA3,
        Evidence("Gemma 3 (text: 270M, 1B)"),
        fixed=_CAUSAL,
        spelled={"hidden_act": "hidden_activation"},
        activations=("gelu_pytorch_tanh",),
        biases=_attention_biases,
        windows=_pattern_windows,
        rotaries=_gemma3_rotaries,
        blocks=_gemma3_blocks,
        names=_SANDWICH,
    ),
    "Gemma4ForCausalLM": _gemma4_architecture(_GEMMA4, "Gemma 4 as text: E2B, E4B, 31B, 26B-A4B"),
    "Gemma4UnifiedForCausalLM": _gemma4_architecture(
        _GEMMA4 | {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262144, "sliding_window": 1024},
        "Gemma 4 as text: 12B",
    ),
    "CohereForCausalLM": Architecture(
        _COHERE,
        Evidence("Command R, Aya 23 (not Command R+)"),
        fixed={"use_qk_norm": False},
        spelled={"norm_eps": "layer_norm_eps"},
        norm="layer",
        biases=_attention_biases,
        blocks=_cohere_blocks,
        names=TensorNames(interleaved=True),
    ),
    "Cohere2ForCausalLM": Architecture(
        _COHERE2,
        Evidence("Command R7B, Command A"),
        spelled={"norm_eps": "layer_norm_eps"},
        norm="layer",
        biases=_attention_biases,
        windows=_pattern_windows,
        rotaries=_cohere2_rotaries,
        blocks=_cohere_blocks,
        names=TensorNames(interleaved=True),
    ),
}
