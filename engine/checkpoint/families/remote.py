"""Families whose checkpoints bring programs of their own, which are never run: they are computed from descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from farsight.engine.checkpoint.config_fields import Fields
from farsight.engine.checkpoint.families.llama import COMMON
from farsight.engine.checkpoint.families.record import Architecture, Biases, Blocks, Evidence, TensorNames

_REFERENCE = "a description"
_INTERNLM2 = COMMON | {
    "vocab_size": 103168,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "bias": True,
}
_BAICHUAN = COMMON | {"vocab_size": 125696, "intermediate_size": 11008}
_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 22016,
    "max_position_embeddings": 8192,
    "layer_norm_epsilon": 1e-6,
    "rotary_emb_base": 10000.0,
    "rotary_pct": 1.0,
    "no_bias": True,
    "tie_word_embeddings": False,
    "eos_token_id": 151643,
}
_CHATGLM = {
    "padded_vocab_size": 65024,
    "hidden_size": 4096,
    "num_layers": 28,
    "num_attention_heads": 32,
    "ffn_hidden_size": 13696,
    "kv_channels": 128,
    "seq_length": 2048,
    "layernorm_epsilon": 1e-5,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "add_qkv_bias": True,
    "add_bias_linear": False,
    "rope_ratio": 1.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def _internlm_biases(config: Fields) -> Biases:
    attention = config.flag("bias")
    return Biases(attention, attention)


def _baichuan(config: Fields) -> Mapping[str, Any]:
    """The 13B models have no field of positions: ALiBi is in their program."""
    length = config.size_or_none("max_position_embeddings")
    return {
        "max_position_embeddings": length or config.size_or_none("model_max_length") or 4096,
        "alibi": length is None,
    }


def _baichuan_blocks(config: Fields) -> Blocks:
    return Blocks(alibi=config.flag("alibi"), unit_head=True)


def _qwen(config: Fields) -> Mapping[str, Any]:
    """``intermediate_size`` counts gate and up together."""
    return {"intermediate_size": config.size("intermediate_size") // 2, "hidden_act": "silu"}


def _chatglm(config: Fields) -> Mapping[str, Any]:
    heads = config.size("num_attention_heads")
    return {
        "num_key_value_heads": config.size("multi_query_group_num") if config.flag("multi_query_attention") else heads,
        "hidden_act": "silu",
        "rope_theta": 10000.0 * config.positive("rope_ratio"),
        "partial_rotary_factor": 0.5,
    }


_BAICHUAN_NAMES = TensorNames(qkv=("self_attn.W_pack",))
_BAICHUAN_2 = Architecture(
    _BAICHUAN,
    Evidence("Baichuan 2 7B (rotary) and 13B (ALiBi)", _REFERENCE, verified=False),
    derived=_baichuan,
    blocks=_baichuan_blocks,
    names=_BAICHUAN_NAMES,
)

REMOTE: Mapping[str, Architecture] = {
    "InternLM2ForCausalLM": Architecture(
        _INTERNLM2,
        Evidence("InternLM 2 and 2.5", _REFERENCE, verified=False),
        biases=_internlm_biases,
        names=TensorNames(
            embedding="model.tok_embeddings",
            lm_head="output",
            input_norm="attention_norm",
            qkv=("attention.wqkv",),
            out="attention.wo",
            post_norm="ffn_norm",
            up=("feed_forward.w1", "feed_forward.w3"),
            down="feed_forward.w2",
            grouped=True,
        ),
    ),
    "BaichuanForCausalLM": _BAICHUAN_2,
    "BaiChuanForCausalLM": replace(
        _BAICHUAN_2,
        defaults=_BAICHUAN | {"vocab_size": 64000, "max_position_embeddings": 4096},
        evidence=Evidence("Baichuan 7B", _REFERENCE, verified=False),
        blocks=Blocks(),
    ),
    "QWenLMHeadModel": Architecture(
        _QWEN,
        Evidence("Qwen 1 (up to the length of its training)", _REFERENCE, verified=False),
        fixed={"no_bias": True, "rotary_pct": 1.0, "scale_attn_weights": True},
        spelled={
            "norm_eps": "layer_norm_epsilon",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
        },
        derived=_qwen,
        biases=Biases(qkv=True),
        names=TensorNames(
            embedding="transformer.wte",
            layers="transformer.h",
            norm="transformer.ln_f",
            input_norm="ln_1",
            qkv=("attn.c_attn",),
            out="attn.c_proj",
            post_norm="ln_2",
            up=("mlp.w2", "mlp.w1"),
            down="mlp.c_proj",
        ),
    ),
    "ChatGLMModel": Architecture(
        _CHATGLM,
        Evidence("ChatGLM2, ChatGLM3, GLM-4-9B (as published)", _REFERENCE, verified=False),
        fixed={
            "add_bias_linear": False,
            "rmsnorm": True,
            "post_layer_norm": True,
            "apply_residual_connection_post_layernorm": False,
            "original_rope": True,
        },
        spelled={
            "vocab_size": "padded_vocab_size",
            "num_hidden_layers": "num_layers",
            "intermediate_size": "ffn_hidden_size",
            "head_dim": "kv_channels",
            "num_key_value_heads": "multi_query_group_num",
            "max_position_embeddings": "seq_length",
            "norm_eps": "layernorm_epsilon",
        },
        derived=_chatglm,
        partial_rotary=True,
        biases=lambda config: Biases(qkv=config.flag("add_qkv_bias")),
        names=TensorNames(
            embedding="transformer.embedding.word_embeddings",
            layers="transformer.encoder.layers",
            norm="transformer.encoder.final_layernorm",
            lm_head="transformer.output_layer",
            qkv=("self_attention.query_key_value",),
            out="self_attention.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
            ignored=("rotary_pos_emb.inv_freq",),
            interleaved=True,
        ),
    ),
}
