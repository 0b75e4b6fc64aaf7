"""A safetensors checkpoint, read into the fused tensors that the forward pass multiplies with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import InvalidValueError
from engine.model_config import POSITION_OFFSET, ModelConfig

LARGE_MODEL_PARAMETERS = 500_000_000
"""Above this, ``auto`` keeps the checkpoint's own dtype: twice the memory and time is too much for exactness."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CheckpointError(InvalidValueError):
    """A checkpoint whose files or tensors are not those of its configuration."""


@dataclass(frozen=True, slots=True)
class Linear:
    """``x @ weight.T + bias``; the weight is ``[out, in]``, the bias ``[out]``."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Norm:
    """Weight and bias, each ``[hidden]``."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer.

    Attributes:
        qkv: ``[(heads + 2 * kv_heads) * head_dim, hidden]``: queries, then keys, then values.
        q_norm: ``[head_dim]``, of each head of the queries; None without.
        k_norm: The same of the keys.
        post_norm: Before the MLP.
        up: ``[2 * intermediate, hidden]``, gate, then up, where the MLP is gated; else ``[intermediate, hidden]``.
    """

    input_norm: Norm
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_norm: Norm
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The whole model.

    Attributes:
        embedding: ``[vocab, hidden]``.
        positions: ``[context, hidden]``, by position; None if positions are not learned.
        norm: Before ``lm_head``; None if there is none.
        lm_head: ``[vocab, hidden]``; ``embedding`` itself when they are tied.
    """

    embedding: Tensor
    positions: Tensor | None
    layers: tuple[LayerWeights, ...]
    norm: Norm | None
    lm_head: Tensor


def parse_dtype(name: str, config: ModelConfig) -> torch.dtype:
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


def load_weights(model_dir: Path, config: ModelConfig, dtype: torch.dtype) -> ModelWeights:
    """Reads ``model.safetensors``, or the shards that ``model.safetensors.index.json`` lists.

    Raises:
        CheckpointError: no such files, an unreadable file, or a missing, unexpected or odd tensor; names it.
    """
    allocation = _Allocation(config, dtype)
    weights, targets = allocation.model(), allocation.targets
    missing = set(targets)
    for found, tensor in _tensors(model_dir):
        name = found if found in targets else f"model.{found}"  # a checkpoint of the model without its head
        if name not in targets:
            if _may_be_ignored(found, config):
                continue
            expected = f"only tensors of {config.architecture} with {config.num_hidden_layers} layers"
            raise CheckpointError(found, list(tensor.shape), expected)
        _fill(targets[name], tensor, found)
        missing.discard(name)
    if missing:
        raise CheckpointError(min(missing), "nothing", f"a tensor ({len(missing)} of {len(targets)} are missing)")
    return weights


def _fill(target: Tensor, tensor: Tensor, name: str) -> None:
    if tensor.shape != target.shape or not tensor.is_floating_point() or tensor.itemsize < 2:
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise CheckpointError(name, found, f"float32, bfloat16 or float16 of shape {list(target.shape)}")
    target.copy_(tensor)


class _Allocation:
    """Makes the tensors of a model.

    Attributes:
        targets: Where each tensor of the checkpoint goes: views into the fused tensors, by the checkpoint's names.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.targets: dict[str, Tensor] = {}
        self._config = config
        self._dtype = dtype
        self._names = _NAMES.get(config.architecture, _TensorNames())

    def model(self) -> ModelWeights:
        config, names = self._config, self._names
        embedding = self._tensor(f"{names.model}.embed_tokens.weight", config.vocab_size, config.hidden_size)
        lm_head = embedding
        if not config.tie_word_embeddings:
            lm_head = self._tensor("lm_head.weight", config.vocab_size, config.hidden_size)
        return ModelWeights(
            embedding=embedding,
            positions=self._positions() if config.rotary is None else None,
            layers=tuple(self._layer(f"{names.model}.layers.{i}.") for i in range(config.num_hidden_layers)),
            norm=self._norm(f"{names.model}.{names.norm}") if config.final_norm else None,
            lm_head=lm_head,
        )

    def _positions(self) -> Tensor:
        rows = self._config.max_position_embeddings + POSITION_OFFSET
        table = self._tensor(f"{self._names.model}.embed_positions.weight", rows, self._config.hidden_size)
        return table[POSITION_OFFSET:]

    def _layer(self, prefix: str) -> LayerWeights:
        config, names = self._config, self._names
        hidden = config.hidden_size
        query, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        return LayerWeights(
            input_norm=self._norm(prefix + names.input_norm),
            qkv=self._linear(prefix, names.qkv, [query, kv, kv], hidden, bias=config.qkv_bias),
            q_norm=self._tensor(f"{prefix}self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=self._tensor(f"{prefix}self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
            out=self._linear(prefix, [names.out], [hidden], query, bias=config.out_bias),
            post_norm=self._norm(prefix + names.post_norm),
            up=self._linear(prefix, names.up, self._up_sizes(), hidden, bias=config.mlp_bias),
            down=self._linear(prefix, [names.down], [hidden], config.intermediate_size, bias=config.mlp_bias),
        )

    def _up_sizes(self) -> list[int]:
        return [self._config.intermediate_size] * (self._config.up_size // self._config.intermediate_size)

    def _linear(self, prefix: str, names: Sequence[str], sizes: list[int], inputs: int, *, bias: bool) -> Linear:
        """A layer of ``sum(sizes)`` outputs; the checkpoint holds them in so many tensors or in a single one."""
        sizes = sizes if len(names) > 1 else [sum(sizes)]
        weight = torch.empty(sum(sizes), inputs, dtype=self._dtype)
        self._register(prefix, names, "weight", torch.split(weight, sizes))
        if not bias:
            return Linear(weight, None)
        biases = torch.empty(sum(sizes), dtype=self._dtype)
        self._register(prefix, names, "bias", torch.split(biases, sizes))
        return Linear(weight, biases)

    def _register(self, prefix: str, names: Sequence[str], kind: str, parts: Sequence[Tensor]) -> None:
        self.targets.update({f"{prefix}{name}.{kind}": part for name, part in zip(names, parts, strict=True)})

    def _norm(self, name: str) -> Norm:
        hidden = self._config.hidden_size
        bias = self._tensor(f"{name}.bias", hidden) if self._config.norm == "layer" else None
        return Norm(self._tensor(f"{name}.weight", hidden), bias)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        self.targets[name] = torch.empty(shape, dtype=self._dtype)
        return self.targets[name]


@dataclass(frozen=True, slots=True)
class _TensorNames:
    """What a checkpoint calls its tensors; those of a layer without ``layers.N.``. Llama's unless given."""

    model: str = "model"
    norm: str = "norm"
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    post_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"


_NAMES = {
    "Phi3ForCausalLM": _TensorNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    "OPTForCausalLM": _TensorNames(
        model="model.decoder",
        norm="final_layer_norm",
        input_norm="self_attn_layer_norm",
        out="self_attn.out_proj",
        post_norm="final_layer_norm",
        up=("fc1",),
        down="fc2",
    ),
}


def _may_be_ignored(name: str, config: ModelConfig) -> bool:
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
