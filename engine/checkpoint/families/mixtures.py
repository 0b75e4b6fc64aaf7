"""Families with mixtures of experts: Mixtral, Qwen 2 and 3, OLMoE, Granite, gpt-oss and ERNIE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farsight.engine.checkpoint.config_fields import Fields
from farsight.engine.checkpoint.families.llama import COMMON, ERNIE, granite_blocks, optional_biases
from farsight.engine.checkpoint.families.record import (
    NEW,
    Architecture,
    Biases,
    Blocks,
    ClampedGate,
    Evidence,
    Experts,
    TensorNames,
    Windows,
    chosen_experts,
    same_window,
    windows_by_type,
)


def _mixtral_experts(config: Fields, num_layers: int) -> Experts:
    count, active = chosen_experts(config, "num_local_experts", "num_experts_per_tok")
    return Experts(count, active, config.size("intermediate_size"), (True,) * num_layers)


def _olmoe_experts(config: Fields, num_layers: int) -> Experts:
    count, active = chosen_experts(config, "num_experts", "num_experts_per_tok")
    inner, normalized = config.size("intermediate_size"), config.flag("norm_topk_prob")
    return Experts(count, active, inner, (True,) * num_layers, normalized=normalized)


def _sparse_layers(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Layers of Qwen that have experts."""
    step, plain = config.size("decoder_sparse_step"), config["mlp_only_layers"] or []
    if not isinstance(plain, list) or not all(type(each) is int and 0 <= each < num_layers for each in plain):
        raise config.error("mlp_only_layers", f"a list of layers from 0 to {num_layers - 1}")
    return tuple(i not in plain and (i + 1) % step == 0 for i in range(num_layers))


def _qwen3_experts(config: Fields, num_layers: int) -> Experts:
    name = "num_experts" if config["num_local_experts"] is None else "num_local_experts"
    count, active = chosen_experts(config, name, "num_experts_per_tok")
    inner, normalized = config.size("moe_intermediate_size"), config.flag("norm_topk_prob")
    return Experts(count, active, inner, _sparse_layers(config, num_layers), normalized=normalized)


def _qwen2_experts(config: Fields, num_layers: int) -> Experts:
    count, active = chosen_experts(config, "num_experts", "num_experts_per_tok")
    return Experts(
        count,
        active,
        config.size("moe_intermediate_size"),
        _sparse_layers(config, num_layers),
        normalized=config.flag("norm_topk_prob"),
        shared_inner=config.size("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _qwen2_windows(config: Fields, num_layers: int) -> Windows:
    """By ``layer_types``; where there are none, every other layer below ``max_window_layers`` slides."""
    slides = config.flag("use_sliding_window")
    window, types = config.size("sliding_window") if slides else None, []
    if config["layer_types"] is None:
        last = config.size("max_window_layers") if slides else 0
        sliding = [i % 2 == 0 and i < last for i in range(num_layers)]
        types = ["sliding_attention" if each else "full_attention" for each in sliding]
    return windows_by_type(config, num_layers, types, window)


def _qwen3_windows(config: Fields, num_layers: int) -> Windows:
    return same_window(config, num_layers) if config.flag("use_sliding_window") else (None,) * num_layers


def _qwen2_biases(config: Fields) -> Biases:
    return Biases(qkv=config.flag("qkv_bias"))


def _gpt_oss(config: Fields) -> Mapping[str, Any]:
    """Where a file says nothing of positions, they are those of the published models, as in transformers."""
    given = config["rope_parameters"] is not None or config["rope_scaling"] is not None
    return {} if given else {"rope_parameters": _GPT_OSS_YARN}


def _gpt_oss_experts(config: Fields, num_layers: int) -> Experts:
    count, active = chosen_experts(config, "num_local_experts", "num_experts_per_tok")
    return Experts(count, active, config.size("intermediate_size"), (True,) * num_layers, router_bias=True)


def _ernie_experts(config: Fields, num_layers: int) -> Experts:
    """Layers of a range, every so many, have experts."""
    count, active = chosen_experts(config, "moe_num_experts", "moe_k")
    bounds = config["moe_layer_start_index"], config["moe_layer_end_index"]
    if not all(type(each) is int for each in bounds):
        raise config.error("moe_layer_start_index", "an integer, as moe_layer_end_index")
    first, last = bounds[0], num_layers - 1 if bounds[1] == -1 else bounds[1]
    step, inner = config.size("moe_layer_interval"), config.size("moe_intermediate_size")
    shared = config["moe_num_shared_experts"] or 0
    return Experts(
        count,
        active,
        inner,
        tuple((i + 1) % step == 0 and first <= i <= last for i in range(num_layers)),
        shared_inner=inner * shared if shared else 0,
        correction=True,
    )


def _gpt_oss_windows(config: Fields, num_layers: int) -> Windows:
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    return windows_by_type(config, num_layers, types, config.size("sliding_window"))


def _gpt_oss_biases(config: Fields) -> Biases:
    attention = config.flag("attention_bias")
    return Biases(attention, attention, mlp=True)


def _gpt_oss_blocks(config: Fields) -> Blocks:
    return Blocks(sinks=True, clamp=ClampedGate(config.positive("swiglu_alpha"), config.positive("swiglu_limit")))


_MIXTRAL = COMMON | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_QWEN = COMMON | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "eos_token_id": None,
}
_QWEN2 = _QWEN | {
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_window_layers": 28,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "qkv_bias": True,
}
_QWEN3 = _QWEN | {
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "mlp_bias": False,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
}
_OLMOE = COMMON | {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "num_experts_per_tok": 8,
    "num_experts": 64,
    "norm_topk_prob": False,
    "eos_token_id": 50279,
}
_GRANITE = COMMON | {
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_GPT_OSS = COMMON | {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "eos_token_id": None,
}
_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_ERNIE = {name: value for name, value in ERNIE.items() if name != "head_dim"} | {
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}
_QWEN2_NAMES = TensorNames(
    shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)

MIXTURES: Mapping[str, Architecture] = {
    "MixtralForCausalLM": Architecture(
        _MIXTRAL,
        Evidence("Mixtral 8x7B and 8x22B"),
        windows=same_window,
        fixed={"attention_bias": False, "layer_types": None},
        experts=_mixtral_experts,
        names=TensorNames(
            router="block_sparse_moe.gate",
            expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
            expert_down="block_sparse_moe.experts.{}.w2",
        ),
    ),
    "Qwen2MoeForCausalLM": Architecture(
        _QWEN2,
        Evidence("Qwen 1.5 and 2 (mixtures of experts)"),
        biases=_qwen2_biases,
        windows=_qwen2_windows,
        experts=_qwen2_experts,
        names=_QWEN2_NAMES,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        _QWEN3,
        Evidence("Qwen 3 (30B-A3B, 235B-A22B)"),
        biases=optional_biases,
        windows=_qwen3_windows,
        fixed={"mlp_bias": False, "layer_types": None},
        blocks=Blocks(head_norm="each"),
        experts=_qwen3_experts,
    ),
    "OlmoeForCausalLM": Architecture(
        _OLMOE,
        Evidence("OLMoE"),
        biases=optional_biases,
        fixed={"mlp_bias": False, "clip_qkv": None},
        blocks=Blocks(head_norm="all"),
        experts=_olmoe_experts,
    ),
    "GraniteMoeForCausalLM": Architecture(
        _GRANITE,
        Evidence("Granite 3 (1B-A400M, 3B-A800M)"),
        biases=optional_biases,
        fixed={"mlp_bias": False},
        blocks=granite_blocks,
        experts=_mixtral_experts,
        names=TensorNames(
            router="block_sparse_moe.router.layer",
            expert_up=("block_sparse_moe.input_linear",),
            expert_down="block_sparse_moe.output_linear",
        ),
    ),
    "Ernie4_5_MoeForCausalLM": Architecture(
        _ERNIE,
        Evidence("ERNIE 4.5 21B-A3B, 300B-A47B", date=NEW),
        fixed={"use_bias": False},
        experts=_ernie_experts,
        names=TensorNames(
            interleaved=True,
            correction="mlp.moe_statics.e_score_correction_bias",
            correction_rows=True,
            elsewhere=("mtp.", "model.mtp_"),
        ),
    ),
    "GptOssForCausalLM": Architecture(
        _GPT_OSS,
        Evidence("gpt-oss 20B and 120B (experts in MXFP4)"),
        derived=_gpt_oss,
        windows=_gpt_oss_windows,
        biases=_gpt_oss_biases,
        blocks=_gpt_oss_blocks,
        experts=_gpt_oss_experts,
        names=TensorNames(
            router="mlp.router",
            expert_up=("mlp.experts.gate_up_proj",),
            expert_down="mlp.experts.down_proj",
            expert_ends=("", "_bias"),
            expert_transposed=True,
            expert_pairs=True,
        ),
    ),
}
