"""Families whose layers have a state in place of attention, all or some of them: LFM 2 and Qwen 3.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farsight.engine.checkpoint.config_fields import Fields
from farsight.engine.checkpoint.families.llama import COMMON
from farsight.engine.checkpoint.families.mixers import DeltaNet, Mixer, ShortConvolution
from farsight.engine.checkpoint.families.record import (
    NEW,
    Architecture,
    Biases,
    Blocks,
    Evidence,
    Experts,
    LayerShape,
    TensorNames,
    chosen_experts,
)

_LFM2 = COMMON | {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
_LFM2_MOE = {name: value for name, value in _LFM2.items() if not name.startswith("block_")} | {
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts_per_tok": 4,
    "num_experts": 32,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
_QWEN = COMMON | {
    "vocab_size": 248320,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "value_heads_tiled": False,
    "eos_token_id": None,
}
_QWEN_MOE = _QWEN | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
_QWEN_NEXT = _QWEN_MOE | {
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}


def _shapes(config: Fields, types: Any, kind: str, mixer: Mixer) -> tuple[LayerShape, ...]:
    """Layers of ``kind`` have the mixer, the others attention."""
    count, heads = config.size("num_hidden_layers"), config.size("num_attention_heads")
    allowed = (kind, "full_attention")
    if not isinstance(types, list) or len(types) != count or not all(each in allowed for each in types):
        raise config.error("layer_types", f"{count} times {' or '.join(allowed)}")
    if "full_attention" not in types:
        raise config.error("layer_types", "a layer with attention at least")
    head_dim = config.size_or_none("head_dim") or config.size("hidden_size") // heads
    sizes = head_dim, config.size_or_none("num_key_value_heads") or heads, config.size("intermediate_size")
    return tuple(LayerShape(*sizes, mixer=mixer if each == kind else None) for each in types)


def _lfm2(config: Fields) -> Mapping[str, Any]:
    """Makes the width of MLPs of another number, and reads some fields by older names."""
    inner = config["block_ff_dim"] or config["intermediate_size"]
    found: dict[str, Any] = {"intermediate_size": inner}
    if config["tie_embedding"] is not None:
        found["tie_word_embeddings"] = config["tie_embedding"]
    if config["block_auto_adjust_ff_dim"] and type(inner) is int:
        multiple = config.size("block_multiple_of")
        inner = int(2 * inner / 3)
        if config["block_ffn_dim_multiplier"] is not None:
            inner = int(config.positive("block_ffn_dim_multiplier") * inner)
            inner = multiple * -(-inner // multiple)
        found["intermediate_size"] = inner
    return found


def _lfm2_shapes(config: Fields, num_layers: int) -> tuple[LayerShape, ...]:
    length = config.size("conv_L_cache", 1 << 10)
    if length < 2:
        raise config.error("conv_L_cache", "an integer >= 2")
    types, attending = config["layer_types"], config["full_attn_idxs"]
    if types is None:
        attending = list(range(num_layers)) if attending is None else attending
        if not isinstance(attending, list):
            raise config.error("full_attn_idxs", "a list of layers")
        types = ["full_attention" if i in attending else "conv" for i in range(num_layers)]
    return _shapes(
        config, types, "conv", ShortConvolution(length, config.size("hidden_size"), config.flag("conv_bias"))
    )


def _lfm2_experts(config: Fields, num_layers: int) -> Experts:
    count, active = chosen_experts(config, "num_experts", "num_experts_per_tok")
    dense = config["num_dense_layers"]
    if type(dense) is not int or dense < 0:
        raise config.error("num_dense_layers", "an integer >= 0")
    return Experts(
        count,
        active,
        config.size("moe_intermediate_size"),
        tuple(i >= dense for i in range(num_layers)),
        scores="sigmoid",
        normalized=config.flag("norm_topk_prob"),
        scale=config.positive("routed_scaling_factor"),
        correction=config.flag("use_expert_bias"),
    )


_LFM2_NAMES = TensorNames(
    norm="model.embedding_norm",
    input_norm="operator_norm",
    post_norm="ffn_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    out="self_attn.out_proj",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    router="feed_forward.gate",
    correction="feed_forward.expert_bias",
    expert_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
    expert_down="feed_forward.experts.{}.w2",
    mixer="conv",
    mixer_in=("in_proj",),
    mixer_conv="conv",
)


def _qwen(config: Fields) -> Mapping[str, Any]:
    """Drops the axes of images: tokens of text have one position."""
    rope = config["rope_parameters"]
    if not isinstance(rope, dict):
        return {}
    return {"rope_parameters": {name: value for name, value in rope.items() if not name.startswith("mrope_")}}


def _qwen_shapes(config: Fields, num_layers: int) -> tuple[LayerShape, ...]:
    mixer = DeltaNet(
        config.size("linear_conv_kernel_dim", 1 << 10),
        config.size("linear_num_key_heads"),
        config.size("linear_num_value_heads"),
        config.size("linear_key_head_dim"),
        config.size("linear_value_head_dim"),
        config.flag("value_heads_tiled"),
    )
    if mixer.value_heads % mixer.key_heads:
        raise config.error("linear_num_value_heads", f"a multiple of the {mixer.key_heads} key heads")
    if mixer.length < 2:
        raise config.error("linear_conv_kernel_dim", "an integer >= 2")
    types = config["layer_types"]
    if types is None:
        every = config.size("full_attention_interval")
        types = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(num_layers)]
    return _shapes(config, types, "linear_attention", mixer)


def _qwen_biases(config: Fields) -> Biases:
    attention = config.flag("attention_bias")
    return Biases(attention, attention)


def _qwen_experts(config: Fields, num_layers: int) -> Experts:
    count, active = chosen_experts(config, "num_experts", "num_experts_per_tok")
    step, plain = config["decoder_sparse_step"] or 1, config["mlp_only_layers"] or []
    if type(step) is not int or not isinstance(plain, list):
        raise config.error("decoder_sparse_step", "an integer >= 1, and mlp_only_layers a list")
    return Experts(
        count,
        active,
        config.size("moe_intermediate_size"),
        tuple(i not in plain and (i + 1) % step == 0 for i in range(num_layers)),
        normalized=config["norm_topk_prob"] is not False,
        shared_inner=config.size("shared_expert_intermediate_size"),
        shared_gate=True,
    )


_QWEN_BLOCKS = Blocks(norm_offset=1.0, head_norm="each", attention_gate=True)
_QWEN_NAMES = TensorNames(
    shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    renamed=(("model.language_model.", "model."),),
    elsewhere=("mtp.", "model.visual."),
)


def _qwen_architecture(
    defaults: Mapping[str, Any], models: str, names: TensorNames, *, experts: bool = True
) -> Architecture:
    return Architecture(
        defaults,
        Evidence(models, date=NEW),
        derived=_qwen,
        biases=_qwen_biases,
        partial_rotary=True,
        blocks=_QWEN_BLOCKS,
        names=names,
        shapes=_qwen_shapes,
        experts=_qwen_experts if experts else None,
    )


HYBRIDS: Mapping[str, Architecture] = {
    "Lfm2ForCausalLM": Architecture(
        _LFM2,
        Evidence("LFM 2 and 2.5", date=NEW),
        spelled={"norm_eps": "norm_eps"},
        derived=_lfm2,
        blocks=Blocks(head_norm="each"),
        names=_LFM2_NAMES,
        shapes=_lfm2_shapes,
    ),
    "Lfm2MoeForCausalLM": Architecture(
        _LFM2_MOE,
        Evidence("LFM 2 8B-A1B and other mixtures of experts", date=NEW),
        spelled={"norm_eps": "norm_eps"},
        derived=_lfm2,
        blocks=Blocks(head_norm="each"),
        names=_LFM2_NAMES,
        shapes=_lfm2_shapes,
        experts=_lfm2_experts,
    ),
    "Qwen3_5ForCausalLM": _qwen_architecture(
        _QWEN, "Qwen 3.5 and 3.6 as text: 0.8B to 27B", _QWEN_NAMES, experts=False
    ),
    "Qwen3_5MoeForCausalLM": _qwen_architecture(
        _QWEN_MOE, "Qwen 3.5 and 3.6 as text: 35B-A3B to 397B-A17B", _QWEN_NAMES
    ),
    "Qwen3NextForCausalLM": _qwen_architecture(
        _QWEN_NEXT,
        "Qwen 3 Next 80B-A3B",
        TensorNames(
            shared_up=_QWEN_NAMES.shared_up,
            shared_down=_QWEN_NAMES.shared_down,
            elsewhere=_QWEN_NAMES.elsewhere,
            mixer_in=("in_proj_qkvz", "in_proj_ba"),
            mixer_grouped=True,
        ),
    ),
}
