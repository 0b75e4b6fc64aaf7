"""How GGUF files hold the families of models, by ``general.architecture``, as llama.cpp's converter writes them.

What a family computes is in its own record (``ARCHITECTURES``); here is what its files call things, and what they leave
out. Norms that a family adds something to are stored with the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from farsight.engine.checkpoint.families.record import TensorNames

if TYPE_CHECKING:
    from farsight.engine.checkpoint.gguf_model import GGUFKeys

GGUF_NAMES = TensorNames(
    embedding="token_embd",
    layers="blk",
    norm="output_norm",
    lm_head="output",
    input_norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    out="attn_output",
    after_attention="post_attention_norm",
    post_norm="ffn_norm",
    up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    after_mlp="post_ffw_norm",
    router="ffn_gate_inp",
    expert_up=("ffn_gate_exps", "ffn_up_exps"),
    expert_down="ffn_down_exps",
    sinks="attn_sinks.weight",
    shared_up=("ffn_gate_shexp", "ffn_up_shexp"),
    shared_down="ffn_down_shexp",
    shared_gate="ffn_gate_inp_shexp",
    ignored=("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),
)
"""The file's names of the tensors of a layer and of the whole."""


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """One ``general.architecture``. Keys of metadata are without its name.

    Attributes:
        architecture: A key of ``ARCHITECTURES``.
        others: Records of the files that have such a key with a value above 0; of several the last.
        names: The file's names of its tensors.
        neighbours: Whether values of queries and keys that are turned together lie beside each other.
        sizes: Integers, by the names of a ``config.json``: their keys.
        numbers: Likewise; where a number of ``optional`` is missing or 0, the family's default holds.
        fixed: Fields of a ``config.json`` that no file has, and whose default is another.
        only: What is computed where a file has such a key.
        derived: Further fields of a ``config.json``, from the file and the number of layers.
        full_every: The last of so many layers attends to all tokens, the others to a window; 0: a window is that of all
            layers; None: there are none.
        scaled_by_width: Layers of the one model of the family whose attention is scaled by ``hidden_size`` over the
            number of heads, and not by ``head_dim``: no file says it.
        proportional: Whether factors of frequencies say no more than which are not turned.
        yarn_truncates: Whether the ends of yarn's ramp are whole numbers of frequencies.
    """

    architecture: str
    others: Mapping[str, GGUFFamily] = field(default_factory=dict)
    names: TensorNames = GGUF_NAMES
    neighbours: bool = False
    sizes: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    only: Mapping[str, object] = field(default_factory=dict)
    derived: Callable[[GGUFKeys, int], Mapping[str, Any]] | None = None
    full_every: int | None = None
    scaled_by_width: int = 0
    yarn_truncates: bool = True
    proportional: bool = False


_QWEN_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_LOCAL_EXPERTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_GATE_AND_UP = replace(GGUF_NAMES, up=("ffn_up",))
_SOFT_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_MISTRAL = GGUFFamily("MistralForCausalLM", neighbours=True, full_every=0)
_MIXTRAL = replace(_MISTRAL, architecture="MixtralForCausalLM", sizes=_LOCAL_EXPERTS)
_GRANITE = GGUFFamily(
    "GraniteForCausalLM",
    neighbours=True,
    numbers={"attention_multiplier": "attention.scale", "logits_scaling": "logit_scale"},
    optional={"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale"},
    only={"rope.scaling.finetuned": True},  # without it llama.cpp turns nothing
)


def _lfm2(keys: GGUFKeys, num_layers: int) -> Mapping[str, Any]:
    held = [keys.has(f"blk.{i}.shortconv.conv.weight") for i in range(num_layers)]
    found = {"layer_types": ["conv" if each else "full_attention" for each in held]}
    return found | {"num_dense_layers": keys.size("leading_dense_block_count", 0)}


def _qwen35(keys: GGUFKeys, num_layers: int) -> Mapping[str, Any]:
    held = [keys.has(f"blk.{i}.ssm_a") for i in range(num_layers)]
    heads = keys.size("ssm.time_step_rank")
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in held],
        "linear_value_head_dim": keys.size("ssm.inner_size") // heads,
    }


def _gemma4(keys: GGUFKeys, num_layers: int) -> Mapping[str, Any]:
    """Returns the sizes of layers with a window and of the others, by the first of each."""
    slides = keys.flags("attention.sliding_window_pattern", num_layers)
    if slides is None or len(set(slides)) != 2:
        raise keys.error("attention.sliding_window_pattern", f"{num_layers} flags, true and false")
    near, far = slides.index(True), slides.index(False)
    heads = keys.sizes("attention.head_count_kv", num_layers)
    inner = keys.sizes("feed_forward_length", num_layers)
    width, turned = keys.size("attention.key_length"), keys.factors()
    partial = 1.0 if turned is None else 2 * sum(each < _NOT_TURNED for each in turned) / width
    return {
        "head_dim": keys.size("attention.key_length_swa"),
        "global_head_dim": width,
        "num_key_value_heads": heads[near if len(heads) > 1 else 0],
        "num_global_key_value_heads": heads[far if len(heads) > 1 else 0],
        "attention_k_eq_v": not keys.has(f"blk.{far}.attn_v.weight"),
        "num_kv_shared_layers": keys.size("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": keys.size("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": keys.file.tensors["token_embd.weight"].shape[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": partial,
                "rope_theta": keys.number("rope.freq_base"),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa")},
        },
    }


_NOT_TURNED = 1e20


def _glm4_moe(keys: GGUFKeys, _num_layers: int) -> Mapping[str, Any]:
    return {
        "first_k_dense_replace": keys.size("leading_dense_block_count", 0),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
    }


_LFM2 = GGUFFamily(
    "Lfm2ForCausalLM",
    names=replace(
        GGUF_NAMES,
        norm="token_embd_norm",
        mixer="shortconv",
        mixer_in=("in_proj",),
        mixer_conv="conv",
        correction="exp_probs_b.bias",
    ),
    sizes={"conv_L_cache": "shortconv.l_cache"},
    fixed={"block_auto_adjust_ff_dim": False},
    derived=_lfm2,
)
_QWEN35 = GGUFFamily(
    "Qwen3_5ForCausalLM",
    names=replace(
        GGUF_NAMES,
        post_norm="post_attention_norm",
        mixer="",
        mixer_in=("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha"),
        mixer_out="ssm_out",
        mixer_conv="ssm_conv1d",
        rates="ssm_a",
        rates_ready=True,
        steps="ssm_dt.bias",
        mixer_norm="ssm_norm.weight",
        further_layers=True,
    ),
    sizes={
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
    },
    fixed={"value_heads_tiled": True},
    derived=_qwen35,
)
_COHERE = GGUFFamily("CohereForCausalLM", neighbours=True, numbers={"logit_scale": "logit_scale"})

GGUF_FAMILIES: Mapping[str, GGUFFamily] = {
    "llama": GGUFFamily(
        "LlamaForCausalLM",
        neighbours=True,
        others={"attention.sliding_window": _MISTRAL, "expert_count": _MIXTRAL},
    ),
    "mistral3": replace(
        _MISTRAL,
        others={"attention.temperature_scale": replace(_MISTRAL, architecture="Ministral3ForCausalLM")},
    ),
    "qwen2": GGUFFamily("Qwen2ForCausalLM"),
    "qwen2moe": GGUFFamily(
        "Qwen2MoeForCausalLM",
        sizes=_QWEN_EXPERTS | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
    ),
    "qwen3": GGUFFamily("Qwen3ForCausalLM"),
    "qwen3moe": GGUFFamily("Qwen3MoeForCausalLM", sizes=_QWEN_EXPERTS, fixed={"norm_topk_prob": True}),
    "phi3": GGUFFamily("Phi3ForCausalLM", names=replace(_GATE_AND_UP, qkv=("attn_qkv",)), full_every=0),
    "gemma": GGUFFamily("GemmaForCausalLM"),
    "gemma2": GGUFFamily("Gemma2ForCausalLM", optional=_SOFT_CAPS, full_every=2, scaled_by_width=46),
    "gemma3": GGUFFamily(
        "Gemma3ForCausalLM",
        optional=_SOFT_CAPS | {"rope_local_base_freq": "rope.freq_base_swa"},
        full_every=6,
        scaled_by_width=62,
    ),
    "gemma4": GGUFFamily(
        "Gemma4ForCausalLM",
        names=replace(
            GGUF_NAMES,
            all_inputs=("per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm"),
            inputs=("inp_gate", "proj", "post_norm"),
            layer_scale="layer_output_scale.weight",
        ),
        optional={"final_logit_softcapping": "final_logit_softcapping"},
        only={"expert_count": 0},
        full_every=6,
        proportional=True,
        derived=_gemma4,
    ),
    "granite": _GRANITE,
    "granitemoe": replace(
        _GRANITE,
        architecture="GraniteMoeForCausalLM",
        sizes=_LOCAL_EXPERTS,
        only={**_GRANITE.only, "expert_shared_feed_forward_length": 0},
    ),
    "olmo2": GGUFFamily(
        "Olmo2ForCausalLM", others={"attention.sliding_window": GGUFFamily("Olmo3ForCausalLM", full_every=4)}
    ),
    "olmoe": GGUFFamily(
        "OlmoeForCausalLM", sizes={"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    ),
    "smollm3": GGUFFamily("SmolLM3ForCausalLM", neighbours=True),
    "ernie4_5": GGUFFamily("Ernie4_5ForCausalLM", neighbours=True),
    "glm4moe": GGUFFamily(
        "Glm4MoeForCausalLM",
        names=replace(GGUF_NAMES, post_norm="post_attention_norm", correction="exp_probs_b.bias", further_layers=True),
        sizes={
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "n_shared_experts": "expert_shared_count",
        },
        optional={"routed_scaling_factor": "expert_weights_scale"},
        derived=_glm4_moe,
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(_LFM2, architecture="Lfm2MoeForCausalLM", sizes={**_LFM2.sizes, **_QWEN_EXPERTS}, fixed={}),
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35,
        architecture="Qwen3_5MoeForCausalLM",
        sizes={
            **_QWEN35.sizes,
            **_QWEN_EXPERTS,
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
    ),
    "glm4": GGUFFamily("Glm4ForCausalLM", names=_GATE_AND_UP, neighbours=True),
    "command-r": _COHERE,
    "cohere2": replace(_COHERE, architecture="Cohere2ForCausalLM", full_every=4),
    "gpt-oss": GGUFFamily(
        "GptOssForCausalLM",
        names=replace(GGUF_NAMES, post_norm="post_attention_norm"),
        sizes=_LOCAL_EXPERTS | {"intermediate_size": "expert_feed_forward_length"},
        full_every=2,
        yarn_truncates=False,
    ),
}
"""llama.cpp writes Mistral's models as llama's."""
