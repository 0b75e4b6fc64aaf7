"""DeepSeek's families: latent attention, and experts that are chosen group by group. GLM's, which have such experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from farsight.engine.checkpoint.config_fields import Fields
from farsight.engine.checkpoint.families.llama import COMMON
from farsight.engine.checkpoint.families.record import (
    NEW,
    ROPE_KINDS,
    Architecture,
    Biases,
    Blocks,
    Evidence,
    Experts,
    Latent,
    TensorNames,
    Windows,
    chosen_experts,
)
from farsight.engine.checkpoint.rotary_config import RotaryConfig, read_rotary

_V2 = COMMON | {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_V3 = _V2 | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "eos_token_id": 1,
}


_GLM4 = COMMON | {
    "vocab_size": 151552,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "use_qk_norm": False,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "eos_token_id": None,
}


def _latent(config: Fields) -> Latent:
    turned = config.size("qk_rope_head_dim")
    if turned % 2:
        raise config.error("qk_rope_head_dim", "an even number: values are turned in pairs")
    return Latent(
        config.size_or_none("q_lora_rank"),
        config.size("kv_lora_rank"),
        turned,
        config.size("qk_nope_head_dim"),
        config.size("v_head_dim"),
    )


def _one_row(config: Fields) -> Mapping[str, Any]:
    """All heads read one row: it is a single KV head to the pool and to attention."""
    return {"num_key_value_heads": 1, "head_dim": _latent(config).width}


def _rotaries(config: Fields, head_dim: int, windows: Windows) -> tuple[RotaryConfig | None, ...]:
    return (read_rotary(config, _latent(config).turned, ROPE_KINDS, partial=False),) * len(windows)


def _blocks(config: Fields) -> Blocks:
    """Yarn's factor for all dimensions is one of the products here, and not of the tables."""
    scale = _latent(config).query ** -0.5
    rope = config["rope_parameters"] or config["rope_scaling"] or {}
    spread = rope.get("mscale_all_dim") if isinstance(rope, dict) else None
    if spread and (rope.get("rope_type") or rope.get("type")) != "default":
        nested = Fields(rope, {}, "rope_parameters.")
        factor = nested.positive("factor")
        scale *= (0.1 * nested.positive("mscale_all_dim") * math.log(factor) + 1) ** 2 if factor > 1 else 1
    return Blocks(attention_scale=scale)


def _names(config: Fields) -> TensorNames:
    query = "self_attn.q_proj" if config["q_lora_rank"] is None else "self_attn.q_a_proj"
    return TensorNames(
        qkv=(query, "self_attn.kv_a_proj_with_mqa"),
        q_norm="self_attn.q_a_layernorm",
        k_norm="self_attn.kv_a_layernorm",
        interleaved=True,
        further_layers=True,
    )


def _groups(config: Fields, count: int, active: int) -> tuple[int, int]:
    """Groups of experts, and of how many of them a token's experts are."""
    groups, taken = config.size("n_group"), config.size("topk_group")
    if count % groups:
        raise config.error("n_group", f"a divisor of the {count} experts")
    if taken > groups or taken * (count // groups) < active:
        raise config.error("topk_group", f"at most {groups} groups, with {active} experts at least")
    return groups, taken


def _v2_experts(config: Fields, num_layers: int) -> Experts:
    method = config.require("topk_method", ("greedy", "group_limited_greedy"))
    count, active = chosen_experts(config, "n_routed_experts", "num_experts_per_tok")
    groups, taken = (1, 1) if method == "greedy" else _groups(config, count, active)
    inner = config.size("moe_intermediate_size")
    return Experts(
        count,
        active,
        inner,
        _sparse(config, num_layers),
        normalized=False,
        scale=config.positive("routed_scaling_factor"),
        shared_inner=inner * config.size("n_shared_experts"),
        groups=groups,
        active_groups=taken,
    )


def _v3_experts(config: Fields, num_layers: int) -> Experts:
    count, active = chosen_experts(config, "n_routed_experts", "num_experts_per_tok")
    groups, taken = _groups(config, count, active)
    if count // groups < 2:
        raise config.error("n_group", "groups of two experts at least")
    inner = config.size("moe_intermediate_size")
    return Experts(
        count,
        active,
        inner,
        _sparse(config, num_layers),
        scores="sigmoid",
        normalized=config.flag("norm_topk_prob"),
        scale=config.positive("routed_scaling_factor"),
        shared_inner=inner * config.size("n_shared_experts"),
        groups=groups,
        active_groups=taken,
        group_best=2,
        correction=True,
    )


def _glm_biases(config: Fields) -> Biases:
    return Biases(qkv=config.flag("attention_bias"))


def _glm_blocks(config: Fields) -> Blocks:
    return Blocks(head_norm="each" if config.flag("use_qk_norm") else None)


def _sparse(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """All layers but some of the first have experts."""
    dense = config["first_k_dense_replace"]
    if type(dense) is not int or dense < 0:
        raise config.error("first_k_dense_replace", "an integer >= 0")
    return tuple(i >= dense for i in range(num_layers))


_FIXED = {"attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1, "rope_interleave": True}

DEEPSEEK: Mapping[str, Architecture] = {
    "DeepseekV2ForCausalLM": Architecture(
        _V2,
        Evidence("DeepSeek-V2, V2-Lite and V2.5"),
        fixed=_FIXED | {"norm_topk_prob": False, "scoring_func": "softmax"},
        derived=_one_row,
        rotaries=_rotaries,
        blocks=_blocks,
        names=_names,
        experts=_v2_experts,
        latent=_latent,
    ),
    "DeepseekV3ForCausalLM": Architecture(
        _V3,
        Evidence("DeepSeek-V3 and R1"),
        fixed=_FIXED | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        derived=_one_row,
        rotaries=_rotaries,
        blocks=_blocks,
        names=_names,
        experts=_v3_experts,
        latent=_latent,
    ),
    "Glm4MoeForCausalLM": Architecture(
        _GLM4,
        Evidence("GLM-4.5, 4.6 and 4.7 (mixtures of experts without latents)", date=NEW),
        biases=_glm_biases,
        blocks=_glm_blocks,
        partial_rotary=True,
        names=TensorNames(further_layers=True),
        experts=_v3_experts,
    ),
}
