"""Small random models of every family: what each adds to a model of 2 layers and 64 values."""

from __future__ import annotations

from typing import Any

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + i / 3 for i in range(8)]}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "LlamaForCausalLM", "num_key_value_heads": 2},
    "llama yarn": {"architecture": "LlamaForCausalLM", "num_key_value_heads": 2, "rope_parameters": YARN},
    "llama llama3": {"architecture": "LlamaForCausalLM", "num_key_value_heads": 1, "rope_parameters": LLAMA3},
    "mistral": {"architecture": "MistralForCausalLM", "num_key_value_heads": 2, "sliding_window": 21},
    "mistral without windows": {"architecture": "MistralForCausalLM", "num_key_value_heads": 2, "sliding_window": None},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "num_key_value_heads": 2},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "num_key_value_heads": 2, "head_dim": 48},
    "phi3": {"architecture": "Phi3ForCausalLM", "num_key_value_heads": 2},
    "phi3 longrope": {
        "architecture": "Phi3ForCausalLM",
        "num_key_value_heads": 2,
        "original_max_position_embeddings": 8,
        "rope_parameters": {**LONG, "rope_theta": 500.0},
    },
    "smollm3": {
        "architecture": "SmolLM3ForCausalLM",
        "num_key_value_heads": 2,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 19,
    },
    "granite": {
        "architecture": "GraniteForCausalLM",
        "num_key_value_heads": 2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.17,
        "logits_scaling": 2.5,
    },
    "olmo2": {"architecture": "Olmo2ForCausalLM", "num_key_value_heads": 2},
    "glm": {"architecture": "GlmForCausalLM", "num_key_value_heads": 2, "head_dim": 32},
    "glm4": {"architecture": "Glm4ForCausalLM", "num_key_value_heads": 2, "head_dim": 32},
    "opt": {"architecture": "OPTForCausalLM"},
    "gpt2": {"architecture": "GPT2LMHeadModel"},
    "gptj": {"architecture": "GPTJForCausalLM", "rotary_dim": 6, "num_attention_heads": 2},
    "gptj whole heads": {"architecture": "GPTJForCausalLM", "rotary_dim": 16, "n_inner": 80},
    "gpt_neox": {"architecture": "GPTNeoXForCausalLM"},
    "gpt_neox in sequence": {"architecture": "GPTNeoXForCausalLM", "use_parallel_residual": False},
    "bloom": {"architecture": "BloomForCausalLM"},
    "bloom of 6 heads": {"architecture": "BloomForCausalLM", "num_attention_heads": 6, "hidden_size": 96},
    "falcon 7b": {"architecture": "FalconForCausalLM"},
    "falcon 40b": {
        "architecture": "FalconForCausalLM",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "bias": True,
    },
    "falcon of 11b": {
        "architecture": "FalconForCausalLM",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
    },
    "falcon in sequence": {"architecture": "FalconForCausalLM", "multi_query": False, "parallel_attn": False},
    "starcoder2": {"architecture": "Starcoder2ForCausalLM", "num_key_value_heads": 2, "sliding_window": 23},
    "stablelm": {"architecture": "StableLmForCausalLM", "num_key_value_heads": 2, "use_qkv_bias": True},
    "stablelm in parallel": {
        "architecture": "StableLmForCausalLM",
        "num_key_value_heads": 4,
        "use_parallel_residual": True,
        "partial_rotary_factor": 0.5,
    },
    "phi": {"architecture": "PhiForCausalLM"},
    "gemma": {"architecture": "GemmaForCausalLM", "num_key_value_heads": 1, "head_dim": 32},
    "gemma2": {
        "architecture": "Gemma2ForCausalLM",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        "sliding_window": 17,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 7.0,
    },
    "gemma3": {
        "architecture": "Gemma3ForCausalLM",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 40,
        "sliding_window": 17,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "cohere": {"architecture": "CohereForCausalLM", "num_key_value_heads": 2, "logit_scale": 0.5},
    "cohere2": {
        "architecture": "Cohere2ForCausalLM",
        "num_key_value_heads": 2,
        "sliding_window": 18,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Arguments of ``save_model`` by name; the reference is the class of that name in transformers."""
