"""GGUF files of small models, written by the ``gguf`` package as llama.cpp's converter writes them."""

from __future__ import annotations

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
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Phi3ForCausalLM": "phi3",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
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


def stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of all experts of a layer as one."""
    experts: dict[str, dict[int, torch.Tensor]] = {}
    whole = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)(\..*)", name)
        if found is None:
            whole[name] = tensor
        else:
            experts.setdefault(found[1] + found[3], {})[int(found[2])] = tensor
    return whole | {name: torch.stack([each[i] for i in sorted(each)]) for name, each in experts.items()}


def gguf_name(name: str) -> str:
    stem, _, end = name.rpartition(".")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{end}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{PARTS[part]}.{end}"


def heads_of(name: str, config: Mapping[str, Any]) -> int:
    """Heads whose rows the converter turns; 0 for other tensors."""
    if ARCHITECTURES[config["architectures"][0]] != "llama":
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
) -> Path:
    """The model of a directory as a GGUF file.

    Args:
        kind: Type of the matrices. A type that the package cannot quantise to gets random blocks.
        kinds: Other types, by parts of names in transformers.
        vectors: Further tensors in float32, by their names in the file.
        numbers: Further metadata.
        merges: For a tokenizer that has none; llama.cpp reads no vocabulary without one.
    """
    config = json.loads((model_dir / "config.json").read_text())
    writer = gguf.GGUFWriter(str(out), ARCHITECTURES[config["architectures"][0]])
    _write_config(writer, config)
    write_tokenizer(writer, model_dir, merges=merges)
    for name, vector in (vectors or {}).items():
        writer.add_tensor(name, vector.astype(np.float32))
    for name, number in (numbers or {}).items():
        writer.add_uint32(name, number)
    for number, (name, tensor) in enumerate(sorted(stacked(load_file(model_dir / "model.safetensors")).items())):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        own = next((each for part, each in (kinds or {}).items() if part in name), kind)
        heads = heads_of(name, config)
        values = rotated_rows(tensor, heads) if heads else tensor
        _write_tensor(writer, gguf_name(name), values.float().numpy(), own, number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _write_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str, seed: int) -> None:
    if values.ndim == 1 or kind == "F32":
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
    rope = config["rope_parameters"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config["architectures"][0] in ("MistralForCausalLM", "Phi3ForCausalLM") and config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])


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
        found = stored.get(gguf_name(name))
        if found is None:
            continue
        values = torch.from_numpy(gguf.quants.dequantize(found.data, found.tensor_type).copy()).reshape(tensor.shape)
        heads = heads_of(name, config)
        tensors[name] = (plain_rows(values, heads) if heads else values).contiguous()
    save_file(tensors, out / "model.safetensors")
    return out
