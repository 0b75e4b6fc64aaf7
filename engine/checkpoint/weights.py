"""A safetensors checkpoint, read into the fused tensors that the forward pass multiplies with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import InvalidValueError
from engine.checkpoint.config_fields import CheckpointError as CheckpointError
from engine.checkpoint.model_config import POSITION_OFFSET, ModelConfig
from engine.checkpoint.names import check_complete, known_name, names_of

LARGE_MODEL_PARAMETERS = 500_000_000
"""Parameters above which ``auto`` keeps the checkpoint's own dtype: exactness would cost twice the memory and time."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Linear:
    """``x @ weight.T + bias``; the weight is ``[out, in]``, the bias ``[out]``."""

    weight: Tensor
    bias: Tensor | None

    def dense(self) -> Tensor:
        return self.weight


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The same with weights of 4 bits, unpacked each time they are multiplied with.

    Attributes:
        packed: uint8 ``[out, in / 2]``: two neighbours in a byte, the first in its lower half, each plus 8.
        scales: ``[out, groups]``, of as many neighbours each.
    """

    packed: Tensor
    scales: Tensor
    bias: Tensor | None

    def dense(self) -> Tensor:
        pairs = torch.stack((self.packed & 15, self.packed >> 4), -1).view(*self.scales.shape, -1)
        return (pairs.to(self.scales.dtype) - 8).mul_(self.scales[..., None]).view(len(self.packed), -1)


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
        k_norm: The same for the keys.
        post_norm: Before the MLP.
        up: ``[2 * intermediate, hidden]``, gate, then up, where the MLP is gated; else ``[intermediate, hidden]``.
    """

    input_norm: Norm
    qkv: Linear | PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear | PackedLinear
    post_norm: Norm
    up: Linear | PackedLinear
    down: Linear | PackedLinear


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


def parse_dtype(name: str, config: ModelConfig, device: str = "cpu") -> torch.dtype:
    """The dtype to compute in.

    ``auto`` is float32, in which a resumed sequence continues token for token, unless the model has more than
    ``LARGE_MODEL_PARAMETERS`` parameters: then it is the checkpoint's own. On a GPU it is the checkpoint's own if that
    has 16 bits, else bfloat16.

    Raises:
        InvalidValueError: not one of the known names.
    """
    if name == "auto" and device == "cuda":
        own = _DTYPES[config.checkpoint_dtype]
        return torch.bfloat16 if own is torch.float32 else own
    if name == "auto":
        return _DTYPES[config.checkpoint_dtype] if config.num_parameters > LARGE_MODEL_PARAMETERS else torch.float32
    if name not in _DTYPES:
        raise InvalidValueError("dtype", name, f"one of {['auto', *_DTYPES]}")
    return _DTYPES[name]


def load_weights(model_dir: Path, config: ModelConfig, dtype: torch.dtype, device: str = "cpu") -> ModelWeights:
    """Reads ``model.safetensors``, or the shards that ``model.safetensors.index.json`` lists, onto the device.

    Raises:
        CheckpointError: no such files, an unreadable file, or a missing, unexpected or odd tensor; names it.
    """
    weights, targets = allocate_weights(config, dtype, device)
    missing = set(targets)
    for file, found in checkpoint_tensors(model_dir, device):
        name = known_name(found, targets, config)
        if name is not None:
            _fill(targets[name], file.get_tensor(found), found)
            missing.discard(name)
    check_complete(missing, targets)
    return weights


def allocate_weights(
    config: ModelConfig, dtype: torch.dtype, device: str = "cpu"
) -> tuple[ModelWeights, dict[str, Tensor]]:
    """Weights that hold anything, and by the checkpoint's names the places in them where its tensors go."""
    allocation = Allocation(config, dtype, device)
    return allocation.model(), allocation.targets


def _fill(target: Tensor, tensor: Tensor, name: str) -> None:
    if tensor.shape != target.shape or not tensor.is_floating_point() or tensor.itemsize < 2:
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise CheckpointError(name, found, f"float32, bfloat16 or float16 of shape {list(target.shape)}")
    target.copy_(tensor)


class Allocation:
    """Makes the tensors of a model, or of some of its layers.

    Args:
        config: Its layers and their sizes are those to be made.
        first_layer: Number of the first of them in the checkpoint.

    Attributes:
        targets: Where each tensor of the checkpoint goes: views into the fused tensors, by the checkpoint's names.
        names: The checkpoint's names of its tensors.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str, first_layer: int = 0) -> None:
        self.targets: dict[str, Tensor] = {}
        self.names = names_of(config)
        self._config = config
        self._dtype = dtype
        self._device = device
        self._first_layer = first_layer

    def model(self) -> ModelWeights:
        """All of it."""
        embedding = self.embedding()
        lm_head = embedding
        if not self._config.tie_word_embeddings:
            lm_head = self.tensor("lm_head.weight", self._config.vocab_size, self._config.hidden_size)
        return ModelWeights(embedding, self.positions(), self.layers(), self.final_norm(), lm_head)

    def embedding(self) -> Tensor:
        return self.tensor(self.names.embedding, self._config.vocab_size, self._config.hidden_size)

    def positions(self) -> Tensor | None:
        if self._config.rotary is not None:
            return None
        rows = self._config.max_position_embeddings + POSITION_OFFSET
        table = self.tensor(f"{self.names.model}.embed_positions.weight", rows, self._config.hidden_size)
        return table[POSITION_OFFSET:]

    def layers(self) -> tuple[LayerWeights, ...]:
        first = self._first_layer
        return tuple(self._layer(self.names.layer(first + i)) for i in range(self._config.num_hidden_layers))

    def final_norm(self) -> Norm | None:
        return self._norm(f"{self.names.model}.{self.names.norm}") if self._config.final_norm else None

    def _layer(self, prefix: str) -> LayerWeights:
        config, names = self._config, self.names
        hidden = config.hidden_size
        query, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        return LayerWeights(
            input_norm=self._norm(prefix + names.input_norm),
            qkv=self._linear(prefix, names.qkv, [query, kv, kv], hidden, bias=config.qkv_bias),
            q_norm=self.tensor(f"{prefix}self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=self.tensor(f"{prefix}self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
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
        weight = self._empty(sum(sizes), inputs)
        self._register(prefix, names, "weight", torch.split(weight, sizes))
        if not bias:
            return Linear(weight, None)
        biases = self._empty(sum(sizes))
        self._register(prefix, names, "bias", torch.split(biases, sizes))
        return Linear(weight, biases)

    def _register(self, prefix: str, names: Sequence[str], kind: str, parts: Sequence[Tensor]) -> None:
        self.targets.update({f"{prefix}{name}.{kind}": part for name, part in zip(names, parts, strict=True)})

    def _norm(self, name: str) -> Norm:
        hidden = self._config.hidden_size
        bias = self.tensor(f"{name}.bias", hidden) if self._config.norm == "layer" else None
        return Norm(self.tensor(f"{name}.weight", hidden), bias)

    def tensor(self, name: str, *shape: int) -> Tensor:
        self.targets[name] = self._empty(*shape)
        return self.targets[name]

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)


def checkpoint_tensors(model_dir: Path, device: str) -> Iterator[tuple[Any, str]]:
    """Every tensor: the safetensors file that it is in, open to be read onto the device, and its name.

    Raises:
        CheckpointError: there are no files, or one cannot be read.
    """
    for path in _files(model_dir):
        try:
            with safe_open(path, framework="pt", device=device) as file:
                for name in file.keys():  # noqa: SIM118 (not a dict: it cannot be iterated itself)
                    yield file, name
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
