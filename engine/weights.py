"""A safetensors checkpoint, read into the fused tensors that the forward pass multiplies with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import InvalidValueError
from engine.model_config import LlamaConfig

LARGE_MODEL_PARAMETERS = 500_000_000
"""Above this, ``auto`` keeps the checkpoint's own dtype: twice the memory and time is too much for exactness."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CheckpointError(InvalidValueError):
    """A checkpoint whose files or tensors are not those of its configuration."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; matrices are ``[out, in]``.

    Attributes:
        qkv: ``[(heads + 2 * kv_heads) * head_dim, hidden]``: queries, then keys, then values.
        gate_up: ``[2 * intermediate, hidden]``: gate, then up.
    """

    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """The whole model; ``lm_head`` is ``embedding`` itself when they are tied. Both are ``[vocab, hidden]``."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor


def parse_dtype(name: str, config: LlamaConfig) -> torch.dtype:
    """The dtype to compute in.

    ``auto`` is float32, in which a resumed sequence continues token for token, unless the model has more than
    ``LARGE_MODEL_PARAMETERS`` parameters: then it is the checkpoint's own.

    Raises:
        InvalidValueError: not one of the known names.
    """
    if name == "auto":
        return _DTYPES[config.checkpoint_dtype] if config.num_parameters > LARGE_MODEL_PARAMETERS else torch.float32
    if name not in _DTYPES:
        raise InvalidValueError("dtype", name, f"one of {['auto', *_DTYPES]}")
    return _DTYPES[name]


def load_weights(model_dir: Path, config: LlamaConfig, dtype: torch.dtype) -> LlamaWeights:
    """Reads ``model.safetensors``, or the shards that ``model.safetensors.index.json`` lists.

    Raises:
        CheckpointError: no such files, an unreadable file, or a missing, unexpected or odd tensor; names it.
    """
    weights = _allocate(config, dtype)
    targets = _targets(weights, config)
    missing = set(targets)
    for name, tensor in _tensors(model_dir):
        if name not in targets:
            if _may_be_ignored(name, config):
                continue
            expected = f"only tensors of a Llama model of {config.num_hidden_layers} layers"
            raise CheckpointError(name, list(tensor.shape), expected)
        target = targets[name]
        if tensor.shape != target.shape or not tensor.is_floating_point() or tensor.itemsize < 2:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise CheckpointError(name, found, f"float32, bfloat16 or float16 of shape {list(target.shape)}")
        target.copy_(tensor)
        missing.discard(name)
    if missing:
        raise CheckpointError(min(missing), "nothing", f"a tensor ({len(missing)} of {len(targets)} are missing)")
    return weights


def _allocate(config: LlamaConfig, dtype: torch.dtype) -> LlamaWeights:
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    layers = tuple(
        LayerWeights(
            input_norm=empty(hidden),
            qkv=empty((heads + 2 * kv_heads) * config.head_dim, hidden),
            out=empty(hidden, heads * config.head_dim),
            post_norm=empty(hidden),
            gate_up=empty(2 * config.intermediate_size, hidden),
            down=empty(hidden, config.intermediate_size),
        )
        for _ in range(config.num_hidden_layers)
    )
    embedding = empty(config.vocab_size, hidden)
    lm_head = embedding if config.tie_word_embeddings else empty(config.vocab_size, hidden)
    return LlamaWeights(embedding, layers, empty(hidden), lm_head)


def _targets(weights: LlamaWeights, config: LlamaConfig) -> dict[str, Tensor]:
    """Where each tensor of the checkpoint goes: views into the fused tensors, by the checkpoint's names."""
    targets = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    if not config.tie_word_embeddings:
        targets["lm_head.weight"] = weights.lm_head
    query, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    for i, layer in enumerate(weights.layers):
        parts = {
            "input_layernorm": layer.input_norm,
            "self_attn.o_proj": layer.out,
            "post_attention_layernorm": layer.post_norm,
            "mlp.down_proj": layer.down,
        }
        projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        parts.update(zip(projections, torch.split(layer.qkv, [query, kv, kv]), strict=True))
        parts.update(zip(("mlp.gate_proj", "mlp.up_proj"), layer.gate_up.chunk(2), strict=True))
        targets.update({f"model.layers.{i}.{name}.weight": target for name, target in parts.items()})
    return targets


def _may_be_ignored(name: str, config: LlamaConfig) -> bool:
    """Tensors that carry nothing: a second copy of tied embeddings, and the rotary tables of old checkpoints."""
    return (name == "lm_head.weight" and config.tie_word_embeddings) or name.endswith("rotary_emb.inv_freq")


def _tensors(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    for path in _files(model_dir):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict: it cannot be iterated itself)
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(path.name, str(error), "a readable safetensors file") from error


def _files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if not index.is_file():
        path = model_dir / "model.safetensors"
        if not path.is_file():
            raise CheckpointError("model", str(model_dir), "a directory with model.safetensors or its index")
        return [path]
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(index.name, repr(error), "a JSON object with a weight_map") from error
    return [model_dir / shard for shard in shards]
