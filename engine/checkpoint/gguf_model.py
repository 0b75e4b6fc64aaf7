"""What a GGUF file says about its model, in the words of a ``config.json``; its tensors by their names in transformers.

Knows no torch. Only the factors of rotary embeddings are read from the file's data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from farsight.engine.checkpoint.config_fields import CheckpointError, UnsupportedModelError
from farsight.tokenization.gguf_file import GGUFFile, GGUFTensor
from farsight.tokenization.gguf_texts import gguf_end_ids

ARCHITECTURE_NAMES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
"""By ``general.architecture``: the same in transformers. llama.cpp writes Mistral's models as llama's."""

EXPERT_UP, EXPERT_DOWN = ("mlp.experts.gate_proj", "mlp.experts.up_proj"), "mlp.experts.down_proj"
"""As in ``TensorNames``: a file has one tensor for the gates of all experts, and so on."""

_ELSEWHERE = "serve it with llama.cpp behind [[replica]]"
_FAMILY_ELSEWHERE = f"take the model's safetensors directory, whose families are more, or {_ELSEWHERE}"
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_NO_EXPERTS = ("expert_count", "expert_used_count")


def gguf_tensors(file: GGUFFile) -> dict[str, GGUFTensor]:
    """The tensors by their names in transformers; an unknown name stays as it is."""
    fused = file.metadata.get("general.architecture") == "phi3"
    return {_name(name, fused): tensor for name, tensor in file.tensors.items() if name not in _ROPE_FACTORS}


def _name(name: str, fused: bool) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) != 3 or parts[0] != "blk" or parts[2] not in _LAYER:
        return name
    ours = "mlp.gate_up_proj" if fused and parts[2] == "ffn_up" else _LAYER[parts[2]]
    return f"model.layers.{parts[1]}.{ours}.{kind}"


def turned_heads(file: GGUFFile, name: str) -> int:
    """How many heads' rows of a tensor have the values that are rotated together beside each other; 0: none.

    llama.cpp's converter orders the rows of queries and keys of the architecture llama so.
    """
    if file.metadata["general.architecture"] != "llama":
        return 0
    heads = int(file.metadata["llama.attention.head_count"])
    if name.rpartition(".")[0].endswith("self_attn.q_proj"):
        return heads
    if name.rpartition(".")[0].endswith("self_attn.k_proj"):
        return int(file.metadata.get("llama.attention.head_count_kv", heads))
    return 0


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The fields of a ``config.json`` that describe the same model.

    Raises:
        UnsupportedModelError: Another architecture, or a feature that the engine does not compute.
        GGUFError: A field is missing, or has the wrong kind.
    """
    name = file.value("general.architecture", str)
    if name not in ARCHITECTURE_NAMES:
        raise UnsupportedModelError(
            "general.architecture", name, f"one of {', '.join(ARCHITECTURE_NAMES)}: {_FAMILY_ELSEWHERE}"
        )
    _check_whole(file, name)
    keys = _Keys(file, name)
    heads, hidden = keys.size("attention.head_count"), keys.size("embedding_length")
    embedding = _tensor(file, "token_embd.weight")
    head_dim = keys.size("attention.key_length", hidden // heads)
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise keys.error("attention.value_length", f"the key_length, {head_dim}")
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURE_NAMES[name]],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        "eos_token_id": list(gguf_end_ids(file)),
        "attention_bias": name != "qwen2" and _has_bias(file, "attn_q"),
        "mlp_bias": _has_bias(file, "ffn_up"),
        "rope_parameters": _rope(keys, head_dim),
    }
    if name == "qwen3moe":
        raw |= {
            "num_experts": keys.size("expert_count"),
            "num_experts_per_tok": keys.size("expert_used_count"),
            "moe_intermediate_size": keys.size("expert_feed_forward_length"),
            "norm_topk_prob": True,  # the file does not say it: llama.cpp always normalises
            "mlp_only_layers": [i for i in range(raw["num_hidden_layers"]) if _is_dense(file, i)],
        }
    if name == "phi3":  # beside the nested object, where its configuration has a default
        length = keys.size("rope.scaling.original_context_length", raw["max_position_embeddings"])
        raw["original_max_position_embeddings"] = length
    if name in ("llama", "phi3") and keys.size("attention.sliding_window", 0):
        raw["sliding_window"] = keys.size("attention.sliding_window")
        if name == "llama":
            raw["architectures"] = ["MistralForCausalLM"]
    return raw


def rope_factors(file: GGUFFile) -> tuple[float, ...] | None:
    """What each frequency is divided by; None if the file has no such factors."""
    tensor = file.tensors.get("rope_freqs.weight")
    return None if tensor is None else tuple(_floats(file, tensor))


def _check_whole(file: GGUFFile, name: str) -> None:
    """Refuses parts of a model, and models of experts."""
    parts = file.value("split.count", int, 0)
    if parts > 1:
        raise file.error("split.count", parts, "1: join the parts with llama-gguf-split --merge")
    for key in _NO_EXPERTS if name != "qwen3moe" else ():
        if file.value(f"{name}.{key}", int, 0):
            raise UnsupportedModelError(f"{name}.{key}", file.metadata[f"{name}.{key}"], f"0: {_ELSEWHERE}")


class _Keys:
    """Metadata of one architecture."""

    def __init__(self, file: GGUFFile, name: str) -> None:
        self.file = file
        self.name = name

    def size(self, key: str, default: int | None = None) -> int:
        found: int | None = self.file.value(f"{self.name}.{key}", int, default)
        if found is None or (found < 1 and default != 0):
            raise self.error(key, "an integer >= 1")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found: float | None = self.file.value(f"{self.name}.{key}", float, default)
        if found is None or not 0 < found < float("inf"):
            raise self.error(key, "a number > 0")
        return found

    def text(self, key: str) -> str | None:
        found: str | None = self.file.value(f"{self.name}.{key}", str)
        return found

    def error(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.name}.{key}", self.file.metadata.get(f"{self.name}.{key}"), expected)


def _rope(keys: _Keys, head_dim: int) -> dict[str, Any]:
    """``rope_parameters``; factors of Llama 3's kind are not among them, see ``rope_factors``."""
    rope: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    turned = keys.size("rope.dimension_count", head_dim)
    if keys.name == "phi3":
        rope["partial_rotary_factor"] = turned / head_dim
    elif turned != head_dim:
        raise keys.error("rope.dimension_count", f"the heads' size, {head_dim}")
    if "rope_factors_short.weight" in keys.file.tensors:
        return rope | _longrope(keys)
    kind = keys.text("rope.scaling.type") or "none"
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return rope | {"rope_type": "linear", "factor": factor}
    if kind != "none":
        raise keys.error("rope.scaling.type", f"none or linear: {_ELSEWHERE}")
    return rope | {"rope_type": "default"}


def _longrope(keys: _Keys) -> dict[str, Any]:
    short, long = (
        list(_floats(keys.file, _tensor(keys.file, f"rope_factors_{kind}.weight"))) for kind in ("short", "long")
    )
    original = keys.size("rope.scaling.original_context_length")
    rope = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }
    if f"{keys.name}.rope.scaling.attn_factor" in keys.file.metadata:
        rope["attention_factor"] = keys.number("rope.scaling.attn_factor")
    return rope


def _tensor(file: GGUFFile, name: str) -> GGUFTensor:
    if name not in file.tensors or len(file.tensors[name].shape) > 2:
        raise file.error(name, "nothing", "a tensor of that name")
    return file.tensors[name]


def _floats(file: GGUFFile, tensor: GGUFTensor) -> list[float]:
    if tensor.kind != "F32" or tensor.num_bytes > 1 << 16:
        raise file.error(tensor.name, f"{tensor.kind} {tensor.shape}", "some numbers in F32")
    with file.path.open("rb") as data:
        data.seek(tensor.begin)
        values = np.frombuffer(data.read(tensor.num_bytes), "<f4")
    if not np.isfinite(values).all() or not (values > 0).all():
        raise file.error(tensor.name, "other values", "numbers > 0")
    return [float(value) for value in values]


def _is_dense(file: GGUFFile, layer: int) -> bool:
    return f"blk.{layer}.ffn_gate.weight" in file.tensors


def _has_bias(file: GGUFFile, part: str) -> bool:
    return f"blk.0.{part}.bias" in file.tensors


def _dtype(file: GGUFFile) -> str:
    """The float type of the matrices, of several the one of 16 bits; bfloat16 where they are quantised."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"
