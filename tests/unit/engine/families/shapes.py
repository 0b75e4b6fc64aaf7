"""Small random models of every family: what each adds to a model of 2 layers and 64 values."""

from __future__ import annotations

from typing import Any

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500.0}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + i / 3 for i in range(8)]}
SLIDING, FULL = "sliding_attention", "full_attention"
SLIDING_TWICE: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING]}
SCALED = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.17,
    "logits_scaling": 2.5,
}
"""Multipliers of Granite."""


def _of(name: str, **fields: Any) -> dict[str, Any]:
    return {"architecture": name if name.endswith("Model") else f"{name}ForCausalLM", **fields}


def _grouped(name: str, **fields: Any) -> dict[str, Any]:
    """Two heads share each key and value."""
    return _of(name, **({"num_key_value_heads": 2} | fields))


def _experts(count: int, active: int, size: int, **fields: Any) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": active, "moe_intermediate_size": size, **fields}


def _latent(name: str, row: int, content: int, turned: int, value: int, **fields: Any) -> dict[str, Any]:
    """A model that keeps one row for all heads: its size, and those of the parts of a head."""
    sizes = {"kv_lora_rank": row, "qk_nope_head_dim": content, "qk_rope_head_dim": turned, "v_head_dim": value}
    return _of(name, num_key_value_heads=4, **sizes, **fields)


def _routed(count: int, active: int, shared: int, size: int, **fields: Any) -> dict[str, Any]:
    routed = {"n_routed_experts": count, "num_experts_per_tok": active, "n_shared_experts": shared}
    return routed | {"moe_intermediate_size": size, **fields}


def _hybrid(name: str, kinds: str, **fields: Any) -> dict[str, Any]:
    """Layers by their letters: ``a`` has attention, any other what the family has in its place."""
    other = "conv" if name.startswith("Lfm") else "linear_attention"
    types = [FULL if kind == "a" else other for kind in kinds]
    return _grouped(name, num_hidden_layers=len(kinds), layer_types=types, **fields)


def _delta(name: str, kinds: str, **fields: Any) -> dict[str, Any]:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12}
    return _hybrid(name, kinds, head_dim=32, linear_value_head_dim=20, **heads, **fields)


GEMMA4: dict[str, Any] = {
    **{"head_dim": 16, "global_head_dim": 32, "sliding_window": 17, "final_logit_softcapping": 7.0},
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 500.0},
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    },
}
IN_GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2, "num_hidden_layers": 3, "first_k_dense_replace": 1}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _grouped("Llama"),
    "llama yarn": _grouped("Llama", rope_parameters=YARN),
    "llama llama3": _of("Llama", num_key_value_heads=1, rope_parameters=LLAMA3),
    "mistral": _grouped("Mistral", sliding_window=21),
    "mistral without windows": _grouped("Mistral", sliding_window=None),
    "qwen2": _grouped("Qwen2"),
    "qwen3": _grouped("Qwen3", head_dim=48),
    "phi3": _grouped("Phi3"),
    "phi3 longrope": _grouped(
        "Phi3", original_max_position_embeddings=8, rope_parameters={**LONG, "rope_theta": 500.0}
    ),
    "smollm3": _grouped("SmolLM3", no_rope_layer_interval=2, use_sliding_window=True, sliding_window=19),
    "granite": _grouped("Granite", **SCALED),
    "olmo2": _grouped("Olmo2"),
    "glm": _grouped("Glm", head_dim=32),
    "glm4": _grouped("Glm4", head_dim=32),
    "opt": _of("OPT"),
    "gpt2": _of("GPT2LMHeadModel"),
    "gptj": _of("GPTJ", rotary_dim=6, num_attention_heads=2),
    "gptj whole heads": _of("GPTJ", rotary_dim=16, n_inner=80),
    "gpt_neox": _of("GPTNeoX"),
    "gpt_neox in sequence": _of("GPTNeoX", use_parallel_residual=False),
    "bloom": _of("Bloom"),
    "bloom of 6 heads": _of("Bloom", num_attention_heads=6, hidden_size=96),
    "falcon 7b": _of("Falcon"),
    "falcon 40b": _of("Falcon", new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon of 11b": _of("Falcon", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "falcon in sequence": _of("Falcon", multi_query=False, parallel_attn=False),
    "starcoder2": _grouped("Starcoder2", sliding_window=23),
    "stablelm": _grouped("StableLm", use_qkv_bias=True),
    "stablelm in parallel": _of(
        "StableLm", num_key_value_heads=4, use_parallel_residual=True, partial_rotary_factor=0.5
    ),
    "phi": _of("Phi"),
    "gemma": _of("Gemma", num_key_value_heads=1, head_dim=32),
    "gemma2": _grouped("Gemma2", head_dim=32, query_pre_attn_scalar=20, sliding_window=17)
    | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0},
    "gemma3": _grouped("Gemma3", head_dim=32, query_pre_attn_scalar=40, sliding_window=17, **SLIDING_TWICE)
    | {
        "rope_parameters": {
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        }
    },
    "cohere": _grouped("Cohere", logit_scale=0.5),
    "cohere2": _grouped("Cohere2", sliding_window=18, layer_types=[SLIDING, FULL]),
    "mixtral": _grouped("Mixtral", num_local_experts=5, sliding_window=21),
    "qwen2 moe": _grouped("Qwen2Moe", **_experts(6, 3, 24, shared_expert_intermediate_size=40)),
    "qwen2 moe, some layers": _grouped("Qwen2Moe", **_experts(4, 2, 48, shared_expert_intermediate_size=16))
    | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "norm_topk_prob": True}
    | {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 2},
    "qwen3 moe": _grouped("Qwen3Moe", head_dim=32, **_experts(9, 4, 40), norm_topk_prob=True, mlp_only_layers=[0]),
    "olmoe": _grouped("Olmoe", num_experts=7, num_experts_per_tok=3),
    "gpt-oss": _grouped("GptOss", head_dim=32, sliding_window=19, swiglu_limit=0.6, **SLIDING_TWICE)
    | {"num_local_experts": 6, "num_experts_per_tok": 3}
    | {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}},
    "deepseek v2": _latent(
        *("DeepseekV2", 20, 12, 8, 10),
        **_routed(8, 3, 2, 24, routed_scaling_factor=1.7, topk_method="group_limited_greedy", **IN_GROUPS),
        q_lora_rank=24,
        rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    ),
    "deepseek v2 lite": _latent("DeepseekV2", 24, 8, 16, 24, q_lora_rank=None, **_routed(6, 2, 1, 40)),
    "deepseek v3": _latent(
        *("DeepseekV3", 20, 12, 8, 16),
        **_routed(12, 3, 1, 24, **IN_GROUPS),
        q_lora_rank=24,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "granite moe": _grouped("GraniteMoe", num_local_experts=6, num_experts_per_tok=3, **SCALED),
    "olmo3": _grouped("Olmo3", sliding_window=19, **SLIDING_TWICE)
    | {"rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 500.0}}},
    "ministral3": _grouped("Ministral3", head_dim=32, rope_parameters={**YARN, "llama_4_scaling_beta": 0.3})
    | {"max_position_embeddings": 128},
    "ernie 4.5": _grouped("Ernie4_5", head_dim=24),
    "ernie 4.5 moe": _grouped("Ernie4_5_Moe", num_hidden_layers=3, moe_num_experts=6, moe_k=3)
    | {"moe_intermediate_size": 24, "moe_num_shared_experts": 2},
    "glm4 moe": _grouped("Glm4Moe", head_dim=32, use_qk_norm=True, attention_bias=True, partial_rotary_factor=0.5)
    | _routed(8, 3, 1, 24, **IN_GROUPS, norm_topk_prob=True, routed_scaling_factor=1.5),
    "gemma4": _grouped("Gemma4", **GEMMA4, **SLIDING_TWICE, num_key_value_heads=2, hidden_size_per_layer_input=0)
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4 e": _grouped("Gemma4", **GEMMA4, num_hidden_layers=5, layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL])
    | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 12}
    | {"vocab_size_per_layer_input": 320},
    "gemma4 moe": _grouped("Gemma4", **GEMMA4, enable_moe_block=True, num_experts=6, top_k_experts=2)
    | {"moe_intermediate_size": 24, "hidden_size_per_layer_input": 0},
    "gemma4 unified": _grouped("Gemma4Unified", **GEMMA4),
    "lfm2": _hybrid("Lfm2", "cac", block_auto_adjust_ff_dim=False, conv_bias=True),
    "lfm2 wide": _hybrid("Lfm2", "cca", conv_L_cache=5, block_multiple_of=16),
    "lfm2 moe": _hybrid("Lfm2Moe", "cac", num_dense_layers=1, **_experts(6, 3, 24), routed_scaling_factor=1.5),
    "qwen3.5": _delta("Qwen3_5", "dad"),
    "qwen3.5 moe": _delta("Qwen3_5Moe", "dda", **_experts(6, 3, 24), shared_expert_intermediate_size=40),
    "qwen3 next": _delta("Qwen3Next", "dad", **_experts(6, 3, 24), shared_expert_intermediate_size=40)
    | {"decoder_sparse_step": 2},
}
"""Arguments of ``save_model`` by name; the reference is the class of that name in transformers."""

HYBRIDS = [name for name in FAMILIES if name.startswith(("lfm2", "qwen3.5", "qwen3 next"))]
"""Families with states beside keys and values."""

UNEVEN = {*HYBRIDS, *(name for name in FAMILIES if name.startswith("gemma4"))}
"""Families whose layers differ in shape, which one rank of processors computes."""
