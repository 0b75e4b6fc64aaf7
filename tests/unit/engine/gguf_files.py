"""GGUF files of small models, written by the ``gguf`` package as llama.cpp's converter writes them."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Phi3ForCausalLM": "phi3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "Olmo2ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "SmolLM3ForCausalLM": "smollm3",
    "Glm4ForCausalLM": "glm4",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "GptOssForCausalLM": "gpt-oss",
    "Olmo3ForCausalLM": "olmo2",
    "Ministral3ForCausalLM": "mistral3",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Glm4MoeForCausalLM": "glm4moe",
    "Gemma4ForCausalLM": "gemma4",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
}
PERMUTED = ("llama", "granite", "granitemoe", "smollm3", "mistral3")
"""Architectures whose queries and keys the converter orders in pairs; GLM's and Cohere's are so in transformers."""

WINDOWED = ("MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
            "Cohere2ForCausalLM", "GptOssForCausalLM", "Olmo3ForCausalLM", "Gemma4ForCausalLM")  # fmt: skip
"""Classes whose window the converter writes."""

MAX_LAYERS = 64

SCALES_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
"""By type of quantised blocks: the bytes where a float16 begins."""


def random_rows(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Blocks of random integers with scales of a sensible size: uint8 ``[rows, bytes]``."""
    generator = np.random.default_rng(seed)
    block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (rows, columns // block, num_bytes), dtype=np.uint8)
    for begin in SCALES_AT[kind]:
        largest = 0.00004 if kind == "Q6_K" else 0.002  # its groups have factors of up to 127 besides
        scales = generator.uniform(0.1 * largest, largest, blocks.shape[:2]).astype(np.float16)
        blocks[..., begin : begin + 2] = scales[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = 120
    return blocks.reshape(rows, -1)


def rotated_rows(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The converter's order of the rows of queries and keys: the two values of a rotation beside each other."""
    return tensor.reshape(heads, 2, len(tensor) // heads // 2, -1).swapaxes(1, 2).reshape(tensor.shape)


def plain_rows(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Its inverse."""
    return tensor.reshape(heads, len(tensor) // heads // 2, 2, -1).swapaxes(1, 2).reshape(tensor.shape)


def _tiled(tensor: torch.Tensor, config: Mapping[str, Any], size: int, dim: int = 0) -> torch.Tensor:
    """The converter's order of value heads of ``size`` values: those that share a head of keys are not neighbours."""
    keys, before = config["linear_num_key_heads"], tensor.shape[:dim]
    heads = tensor.reshape(*before, keys, config["linear_num_value_heads"] // keys, size, *tensor.shape[dim + 1 :])
    return heads.transpose(dim, dim + 1).reshape(tensor.shape)


def _of_hybrid(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> tuple[str, torch.Tensor]:
    """What the converter makes of a tensor of a model with states, or with numbers added to the scores of experts."""
    if name.endswith("layer_scalar"):
        return f"{name}.weight", tensor
    for ending in ("expert_bias", "e_score_correction_bias"):
        if name.endswith(ending):
            return name.removesuffix("_bias") + ("_bias.bias" if ending == "expert_bias" else ".bias"), tensor
    if name.endswith("conv.weight"):
        return name, tensor.squeeze(1)
    if "linear_num_key_heads" not in config:
        return name, tensor
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return name, tensor + 1
    values = config["linear_value_head_dim"]
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        plain = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        rows = tensor.squeeze(1)
        return name, torch.cat([rows[:plain], _tiled(rows[plain:], config, values)])
    if name.endswith(("in_proj_z.weight", "linear_attn.out_proj.weight")):
        return name, _tiled(tensor, config, values, int("out_proj" in name))
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "dt_bias", "A_log")):
        found = _tiled(tensor, config, 1)
        return name.replace("dt_bias", "dt_proj.bias"), -found.exp() if name.endswith("A_log") else found
    return name, tensor


def converted(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors as the converter cuts and joins them: one for the gates of all experts of a layer, and so on."""
    tensors = dict(_of_hybrid(name, tensor, config) for name, tensor in tensors.items())
    experts: dict[str, dict[int, torch.Tensor]] = {}
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".mlp.experts.")
        if found := re.fullmatch(r"(?:(?=model.*mlp)|model\.)(.*\.(?:mlp|feed_forward)\.experts)\.(\d+)(\..*)", name):
            experts.setdefault(found[1] + found[3], {})[int(found[2])] = tensor
        elif found := re.fullmatch(r"model\.(.*)\.block_sparse_moe\.experts\.(\d+)\.(.*)", name):
            experts.setdefault(f"{found[1]}.feed_forward.experts.{found[3]}", {})[int(found[2])] = tensor
        elif name.endswith("block_sparse_moe.input_linear.weight"):  # Granite's
            layer = name.removesuffix(".block_sparse_moe.input_linear.weight")
            gate, up = tensor.chunk(2, 1)
            whole |= {f"{layer}.mlp.experts.gate_proj.weight": gate, f"{layer}.mlp.experts.up_proj.weight": up}
        elif part.startswith(("gate_up_proj", "down_proj")):  # those of gpt-oss
            held = tensor if part.endswith("_bias") else tensor.transpose(1, 2)
            end = "bias" if part.endswith("_bias") else "weight"
            names = ("gate_proj", "up_proj") if part.startswith("gate_up") else ("down_proj",)
            whole |= {f"{layer}.mlp.experts.{each}.{end}": held[:, i :: len(names)] for i, each in enumerate(names)}
        elif name.endswith("sinks"):
            whole[f"{name}.weight"] = tensor
        else:
            whole[name] = tensor
    return whole | {name: torch.stack([each[i] for i in sorted(each)]) for name, each in experts.items()}


@functools.cache
def _name_map(architecture: str) -> gguf.TensorNameMap:
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(number, MAX_LAYERS)


def gguf_name(name: str, architecture: str) -> str:
    """llama.cpp's name of a tensor of transformers."""
    found = _name_map(architecture).get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return found


def heads_of(name: str, config: Mapping[str, Any]) -> int:
    """Heads whose rows the converter turns; 0 for other tensors."""
    if ARCHITECTURES[config["architectures"][0]] not in PERMUTED:
        return 0
    heads = config["num_attention_heads"]
    return heads if ".q_proj." in name else config["num_key_value_heads"] if ".k_proj." in name else 0


def write_gguf(
    out: Path,
    model_dir: Path,
    kind: str = "F32",
    *,
    kinds: Mapping[str, str] | None = None,
    vectors: Mapping[str, np.ndarray] | None = None,
    numbers: Mapping[str, int] | None = None,
    merges: Sequence[str] = (),
    architecture: str = "",
) -> Path:
    """The model of a directory as a GGUF file.

    Args:
        kind: Type of the matrices. A type that the package cannot quantise to gets random blocks.
        kinds: Other types, by parts of names in transformers.
        vectors: Further tensors in float32, by their names in the file.
        numbers: Further metadata.
        merges: For a tokenizer that has none; llama.cpp reads no vocabulary without one.
        architecture: Another ``general.architecture`` than that of the class.
    """
    config = json.loads((model_dir / "config.json").read_text())
    for far in (config.get("per_layer_config") or {}).values():  # of Gemma 4's layers that attend to all tokens
        config |= {"global_head_dim": far["head_dim"], "num_global_key_value_heads": far.get("num_key_value_heads")}
    architecture = architecture or ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(str(out), architecture)
    _write_config(writer, config)
    write_tokenizer(writer, model_dir, merges=merges)
    for name, vector in (vectors or {}).items():
        writer.add_tensor(name, vector.astype(np.float32))
    for name, number in (numbers or {}).items():
        writer.add_uint32(name, number)
    for number, (name, tensor) in enumerate(
        sorted(converted(load_file(model_dir / "model.safetensors"), config).items())
    ):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        own = next((each for part, each in (kinds or {}).items() if part in name), kind)
        heads = heads_of(name, config)
        values = rotated_rows(tensor, heads) if heads else tensor
        if architecture in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + 1
        _write_tensor(writer, gguf_name(name, architecture), values.float().contiguous().numpy(), own, number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _write_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str, seed: int) -> None:
    if values.ndim == 1 or kind == "F32" or name.endswith(".bias"):
        writer.add_tensor(name, values)
        return
    quantization = gguf.GGMLQuantizationType[kind]
    try:
        data = gguf.quants.quantize(values, quantization)
    except NotImplementedError:
        data = random_rows(kind, len(values), values.shape[1], seed)
    writer.add_tensor(name, data, raw_dtype=quantization)


def _write_config(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    inner, shared = config["intermediate_size"], config.get("num_kv_shared_layers", 0)
    own = config["num_hidden_layers"] - shared
    wide = config.get("use_double_wide_mlp")
    writer.add_feed_forward_length([inner] * own + [2 * inner] * shared if wide else inner)
    writer.add_head_count(heads)
    kv_heads = config["num_key_value_heads"]
    if "conv_L_cache" in config:
        kv_heads = [kv_heads * (kind != "conv") for kind in config["layer_types"]]
    elif config.get("attention_k_eq_v"):
        far = config["num_global_key_value_heads"]
        kv_heads = [kv_heads if kind == "sliding_attention" else far for kind in config["layer_types"]]
    writer.add_head_count_kv(kv_heads)
    if "global_head_dim" in config:
        writer.add_key_length_swa(head_dim)
        head_dim = config["global_head_dim"]
        rope = rope | {"partial_rotary_factor": 1}
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))
    writer.add_rope_dimension_count(int(head_dim * partial))
    writer.add_rope_freq_base(rope["rope_theta"])
    if eps := config.get("rms_norm_eps") or config.get("norm_eps"):
        writer.add_layer_norm_rms_eps(eps)
    else:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    if "num_experts_per_tok" in config:
        counts = map(config.get, ("num_local_experts", "num_experts", "n_routed_experts"))
        writer.add_expert_count(next(filter(None, counts)))
        writer.add_expert_used_count(config["num_experts_per_tok"])
    for field, add in (
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("n_shared_experts", writer.add_expert_shared_count),
        ("first_k_dense_replace", writer.add_leading_dense_block_count),
        ("num_dense_layers", writer.add_leading_dense_block_count),
        ("routed_scaling_factor", writer.add_expert_weights_scale),
        ("norm_topk_prob", writer.add_expert_weights_norm),
        ("conv_L_cache", writer.add_shortconv_l_cache),
        ("linear_conv_kernel_dim", writer.add_ssm_conv_kernel),
        ("linear_key_head_dim", writer.add_ssm_state_size),
        ("linear_num_key_heads", writer.add_ssm_group_count),
        ("linear_num_value_heads", writer.add_ssm_time_step_rank),
    ):
        if config.get(field) is not None:
            add(config[field])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    _write_own(writer, config)


def _write_own(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """What some architectures have alone."""
    name = config["architectures"][0]
    if name in WINDOWED and config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
    if name == "Gemma3ForCausalLM":
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if name == "Gemma4ForCausalLM":
        rope = config["rope_parameters"]
        writer.add_shared_kv_layers(config["num_kv_shared_layers"])
        writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        width = config["global_head_dim"] // 2
        turned = int(width * rope["full_attention"]["partial_rotary_factor"])
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * (width - turned), dtype=np.float32))
    if name in ("Olmo3ForCausalLM", "Gemma4ForCausalLM"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if name == "Ministral3ForCausalLM":
        writer.add_rope_scaling_yarn_log_mul(config["rope_parameters"]["mscale_all_dim"])
        writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])
    if "linear_num_value_heads" in config:
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    if name == "GptOssForCausalLM":
        writer.add_expert_feed_forward_length(config["intermediate_size"])


def write_tokenizer(writer: gguf.GGUFWriter, model_dir: Path, pre: str = "gpt-2", merges: Sequence[str] = ()) -> None:
    """A byte-level ``tokenizer.json`` and what stands beside it."""
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    added = {token["content"]: token for token in tokenizer["added_tokens"]}
    ids = tokenizer["model"]["vocab"] | {content: token["id"] for content, token in added.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for content, token in added.items():
        kinds[content] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(list(kinds.values()))
    own_merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    if merges or own_merges:
        writer.add_token_merges(own_merges or list(merges))
    for role in ("bos", "eos", "pad"):
        if settings.get(f"{role}_token"):
            getattr(writer, f"add_{role}_token_id")(ids[settings[f"{role}_token"]])
    writer.add_add_bos_token(tokenizer["post_processor"] is not None)
    if settings.get("chat_template"):
        writer.add_chat_template(settings["chat_template"])


def dequantized(path: Path, model_dir: Path, out: Path) -> Path:
    """The directory with the weights of the GGUF file, turned into float32 by the ``gguf`` package."""
    shutil.copytree(model_dir, out)
    config = json.loads((model_dir / "config.json").read_text())
    config["dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config))
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensors = {}
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        found = stored.get(gguf_name(name, ARCHITECTURES[config["architectures"][0]]))
        if found is None:
            continue
        values = torch.from_numpy(gguf.quants.dequantize(found.data, found.tensor_type).copy()).reshape(tensor.shape)
        heads = heads_of(name, config)
        tensors[name] = (plain_rows(values, heads) if heads else values).contiguous()
    save_file(tensors, out / "model.safetensors")
    return out
