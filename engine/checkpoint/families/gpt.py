"""Families built like GPT: LayerNorms with biases and, mostly, an MLP that is not gated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farsight.engine.checkpoint.config_fields import Fields
from farsight.engine.checkpoint.families.record import (
    PLAIN_GELU,
    Architecture,
    Biases,
    Blocks,
    Evidence,
    TensorNames,
    same_window,
)

_OLD_BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")
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
_GPT2 = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 50256,
}
_GPTJ = _GPT2 | {
    "vocab_size": 50400,
    "n_positions": 2048,
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "rotary_dim": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_GPT_SPELLED = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "norm_eps": "layer_norm_epsilon",
}
_NEOX = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "intermediate_size": 24576,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "use_parallel_residual": True,
    "attention_bias": True,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_BLOOM = {
    "vocab_size": 250880,
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 8,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
_FALCON = {
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "layer_norm_epsilon": 1e-5,
    "new_decoder_architecture": False,
    "multi_query": True,
    "parallel_attn": True,
    "bias": False,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "activation": "gelu",
    "tie_word_embeddings": True,
    "eos_token_id": 11,
}
_STARCODER2 = {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "use_bias": True,
    "tie_word_embeddings": True,
    "eos_token_id": 50256,
}
_STABLELM = {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "use_qkv_bias": False,
    "use_parallel_residual": False,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
_PHI = {
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_EVERYWHERE = Biases(qkv=True, out=True, mlp=True)


def _inner(config: Fields) -> Mapping[str, Any]:
    """The MLP is four times as wide as the model, unless the configuration says otherwise."""
    return {"intermediate_size": config.size_or_none("intermediate_size") or 4 * config.size("hidden_size")}


def _gptj(config: Fields) -> Mapping[str, Any]:
    head_dim = config.size("hidden_size") // config.size("num_attention_heads")
    turned = config.size("rotary_dim", head_dim)
    share = 1.0 if turned == head_dim else (turned + 0.5) / head_dim  # rounded down to ``turned`` values
    return {**_inner(config), "partial_rotary_factor": share}


def _bloom(config: Fields) -> Mapping[str, Any]:
    """No position is beyond what ALiBi is defined for; sequences are as long as those of the training by default."""
    length = config.size_or_none("seq_length") or 2048
    inner = 4 * config.size("hidden_size")
    return {"intermediate_size": inner, "max_position_embeddings": length, "hidden_act": "gelu_new"}


def _opt_biases(config: Fields) -> Biases:
    everywhere = config.flag("enable_bias")
    return Biases(everywhere, everywhere, everywhere)


def _opt(config: Fields) -> Mapping[str, Any]:
    return {"norm_eps": 1e-5}  # torch's own default: there is no field for it


def _opt_names(config: Fields) -> TensorNames:
    return TensorNames(
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        unused_positions=2,
        layers="model.decoder.layers",
        norm="" if config.flag("_remove_final_layer_norm") else "model.decoder.final_layer_norm",
        input_norm="self_attn_layer_norm",
        out="self_attn.out_proj",
        post_norm="final_layer_norm",
        up=("fc1",),
        down="fc2",
    )


def _neox_biases(config: Fields) -> Biases:
    attention = config.flag("attention_bias")
    return Biases(attention, attention, mlp=True)


def _falcon(config: Fields) -> Mapping[str, Any]:
    heads = config.size("num_attention_heads")
    kv_heads = 1 if config.flag("multi_query") else heads
    if config.flag("new_decoder_architecture"):
        kv_heads = config.size_or_none("num_kv_heads") or heads
    inner = config.size_or_none("ffn_hidden_size") or 4 * config.size("hidden_size")
    return {"num_key_value_heads": kv_heads, "intermediate_size": inner}


def _falcon_norms(config: Fields) -> int:
    """Norms that a layer begins with."""
    given: int | None = config.size_or_none("num_ln_in_parallel_attn")
    return (given or 2) if config.flag("new_decoder_architecture") else 1


def _falcon_blocks(config: Fields) -> Blocks:
    parallel = config.flag("new_decoder_architecture") or config.flag("parallel_attn")
    return Blocks(gated=False, parallel=parallel, one_norm=parallel and _falcon_norms(config) == 1)


def _falcon_names(config: Fields) -> TensorNames:
    two = _falcon_norms(config) == 2
    return TensorNames(
        embedding="transformer.word_embeddings",
        layers="transformer.h",
        norm="transformer.ln_f",
        input_norm="ln_attn" if two else "input_layernorm",
        qkv=("self_attention.query_key_value",),
        out="self_attention.dense",
        post_norm="ln_mlp" if two else "post_attention_layernorm",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        grouped=True,
    )


def _falcon_biases(config: Fields) -> Biases:
    everywhere = config.flag("bias")
    return Biases(everywhere, everywhere, everywhere)


def _starcoder_biases(config: Fields) -> Biases:
    everywhere = config.flag("use_bias")
    return Biases(everywhere, everywhere, everywhere)


def _parallel_blocks(config: Fields) -> Blocks:
    return Blocks(gated=False, parallel=config.flag("use_parallel_residual"))


def _stablelm_blocks(config: Fields) -> Blocks:
    parallel = config.flag("use_parallel_residual")
    return Blocks(parallel=parallel, one_norm=parallel)


GPT_LIKE: Mapping[str, Architecture] = {
    "OPTForCausalLM": Architecture(
        _OPT,
        Evidence("OPT (not 350m)"),
        biases=_opt_biases,
        fixed={"do_layer_norm_before": True, "layer_norm_elementwise_affine": True},
        spelled={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        derived=_opt,
        norm="layer",
        activations=("relu", "gelu"),
        rope_kinds=(),
        blocks=Blocks(gated=False),
        names=_opt_names,
    ),
    "GPT2LMHeadModel": Architecture(
        _GPT2,
        Evidence("GPT-2, DistilGPT-2"),
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        spelled=_GPT_SPELLED,
        derived=_inner,
        norm="layer",
        activations=PLAIN_GELU,
        rope_kinds=(),
        biases=_EVERYWHERE,
        blocks=Blocks(gated=False),
        names=TensorNames(
            embedding="transformer.wte",
            positions="transformer.wpe",
            layers="transformer.h",
            norm="transformer.ln_f",
            input_norm="ln_1",
            qkv=("attn.c_attn",),
            out="attn.c_proj",
            post_norm="ln_2",
            up=("mlp.c_fc",),
            down="mlp.c_proj",
            ignored=_OLD_BUFFERS,
            transposed=True,
        ),
    ),
    "GPTJForCausalLM": Architecture(
        _GPTJ,
        Evidence("GPT-J"),
        spelled=_GPT_SPELLED,
        derived=_gptj,
        norm="layer",
        activations=PLAIN_GELU,
        rope_kinds=("default",),
        partial_rotary=True,
        biases=Biases(mlp=True, head=True),
        blocks=Blocks(gated=False, parallel=True, one_norm=True),
        names=TensorNames(
            embedding="transformer.wte",
            layers="transformer.h",
            norm="transformer.ln_f",
            input_norm="ln_1",
            qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
            out="attn.out_proj",
            up=("mlp.fc_in",),
            down="mlp.fc_out",
            ignored=_OLD_BUFFERS,
            interleaved=True,
        ),
    ),
    "GPTNeoXForCausalLM": Architecture(
        _NEOX,
        Evidence("Pythia, GPT-NeoX-20B"),
        spelled={
            "norm_eps": "layer_norm_eps",
            "partial_rotary_factor": "rotary_pct",
            "rope_theta": "rotary_emb_base",
        },
        norm="layer",
        activations=PLAIN_GELU,
        partial_rotary=True,
        biases=_neox_biases,
        blocks=_parallel_blocks,
        names=TensorNames(
            embedding="gpt_neox.embed_in",
            layers="gpt_neox.layers",
            norm="gpt_neox.final_layer_norm",
            qkv=("attention.query_key_value",),
            out="attention.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
            aliases=(("embed_out.weight", "lm_head.weight"),),
            ignored=_OLD_BUFFERS,
            grouped=True,
        ),
    ),
    "BloomForCausalLM": Architecture(
        _BLOOM,
        Evidence("BLOOM, BLOOMZ (ALiBi)"),
        fixed={"apply_residual_connection_post_layernorm": False},
        spelled={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "norm_eps": "layer_norm_epsilon"},
        derived=_bloom,
        norm="layer",
        activations=PLAIN_GELU,
        rope_kinds=(),
        biases=_EVERYWHERE,
        blocks=Blocks(gated=False, embedding_norm=True, alibi=True),
        names=TensorNames(
            embedding="transformer.word_embeddings",
            embedding_norm="transformer.word_embeddings_layernorm",
            layers="transformer.h",
            norm="transformer.ln_f",
            qkv=("self_attention.query_key_value",),
            out="self_attention.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
            grouped=True,
        ),
    ),
    "FalconForCausalLM": Architecture(
        _FALCON,
        Evidence("Falcon 7B, 40B, 180B, Falcon 2 (without ALiBi)"),
        fixed={"alibi": False},
        spelled={
            "hidden_act": "activation",
            "norm_eps": "layer_norm_epsilon",
            "num_key_value_heads": "num_kv_heads",
        },
        derived=_falcon,
        norm="layer",
        activations=PLAIN_GELU,
        biases=_falcon_biases,
        blocks=_falcon_blocks,
        names=_falcon_names,
    ),
    "Starcoder2ForCausalLM": Architecture(
        _STARCODER2,
        Evidence("StarCoder2"),
        spelled={"norm_eps": "norm_epsilon"},
        norm="layer",
        activations=PLAIN_GELU,
        windows=same_window,
        biases=_starcoder_biases,
        blocks=Blocks(gated=False),
        names=TensorNames(up=("mlp.c_fc",), down="mlp.c_proj"),
    ),
    "StableLmForCausalLM": Architecture(
        _STABLELM,
        Evidence("StableLM 3B, StableLM 2 1.6B (not 12B)"),
        fixed={"qk_layernorm": False},
        spelled={"norm_eps": "layer_norm_eps"},
        norm="layer",
        partial_rotary=True,
        biases=lambda config: Biases(qkv=config.flag("use_qkv_bias")),
        blocks=_stablelm_blocks,
    ),
    "PhiForCausalLM": Architecture(
        _PHI,
        Evidence("Phi-1, Phi-1.5, Phi-2"),
        fixed={"qk_layernorm": False},
        spelled={"norm_eps": "layer_norm_eps"},
        norm="layer",
        activations=PLAIN_GELU,
        partial_rotary=True,
        biases=Biases(qkv=True, out=True, mlp=True, head=True),
        blocks=Blocks(gated=False, parallel=True, one_norm=True),
        names=TensorNames(norm="model.final_layernorm", out="self_attn.dense", up=("mlp.fc1",), down="mlp.fc2"),
    ),
}
