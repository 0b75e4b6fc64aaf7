"""A safetensors checkpoint, read into the fused tensors that the forward pass multiplies with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core.errors import InvalidValueError
from engine.checkpoint.config_fields import CheckpointError as CheckpointError
from engine.checkpoint.model_config import POSITION_OFFSET, DecoderConfig
from engine.checkpoint.names import names_of
from engine.checkpoint.quantized import JoinedLinear, QuantizedLinear, join_records
from engine.checkpoint.sources import open_checkpoint

LARGE_MODEL_PARAMETERS = 500_000_000
"""Parameters above which ``auto`` keeps the checkpoint's own dtype: exactness would cost twice the memory and time."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Linear:
    """``x @ weight.T + bias``; the weight is ``[out, in]``, the bias ``[out]``."""

    weight: Tensor
    bias: Tensor | None

    @property
    def outputs(self) -> int:
        """Outputs of the layer."""
        return len(self.weight)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight in ``dtype``."""
        return self.weight.to(dtype)


Matrix = Linear | QuantizedLinear | JoinedLinear
"""A linear layer, in whatever form it is kept."""


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
    qkv: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Matrix
    post_norm: Norm
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The whole model.

    Attributes:
        embedding: ``[vocab, hidden]``.
        positions: ``[context, hidden]``, by position; None if positions are not learned.
        norm: Before ``lm_head``; None if there is none.
        lm_head: ``[vocab, hidden]``; ``embedding`` itself when they are tied and neither is quantised.
    """

    embedding: Tensor
    positions: Tensor | None
    layers: tuple[LayerWeights, ...]
    norm: Norm | None
    lm_head: Tensor | QuantizedLinear


def parse_dtype(name: str, config: DecoderConfig, device: str = "cpu") -> torch.dtype:
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


def load_weights(
    model_dir: Path, config: DecoderConfig, dtype: torch.dtype, device: str = "cpu", *, keep_quantized: bool = True
) -> ModelWeights:
    """Reads a checkpoint onto the device.

    Args:
        model_dir: A directory with ``model.safetensors`` or the shards of its index, or a GGUF file.
        keep_quantized: Whether matrices that are quantised in the checkpoint stay so, where there is a record of their
            format; otherwise they become floats. On a GPU they always do.

    Raises:
        CheckpointError: no such files, an unreadable file, or a missing, unexpected or odd tensor; names it.
        InvalidValueError: a file that leads out of the directory, or a damaged GGUF file.
    """
    source = open_checkpoint(model_dir, config, device)
    keeps = keep_quantized and device == "cpu"
    allocation = Allocation(config, dtype, device, record=source.record if keeps else None)
    weights = allocation.model()
    for name in source.names():
        if name in allocation.targets:  # the others are kept as records
            source.fill(name, allocation.targets[name])
    return weights


def allocate_weights(
    config: DecoderConfig, dtype: torch.dtype, device: str = "cpu"
) -> tuple[ModelWeights, dict[str, Tensor]]:
    """Weights that hold anything, and by the checkpoint's names the places in them where its tensors go."""
    allocation = Allocation(config, dtype, device)
    return allocation.model(), allocation.targets


class Allocation:
    """Makes the tensors of a model, or of some of its layers.

    Args:
        config: Its layers and their sizes are those to be made.
        first_layer: Number of the first of them in the checkpoint.
        record: Gives a matrix of the checkpoint as it is quantised, or None; without it no matrix is.

    Attributes:
        targets: Where each tensor of the checkpoint goes: views into the fused tensors, by the checkpoint's names.
            Matrices that are kept quantised are not among them.
        names: The checkpoint's names of its tensors.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: str,
        first_layer: int = 0,
        record: Callable[[str], QuantizedLinear | None] | None = None,
    ) -> None:
        self.targets: dict[str, Tensor] = {}
        self.names = names_of(config)
        self._config = config
        self._dtype = dtype
        self._device = device
        self._first_layer = first_layer
        self._record = record

    def model(self) -> ModelWeights:
        """All of it."""
        embedding = self.embedding()
        return ModelWeights(embedding, self.positions(), self.layers(), self.final_norm(), self._lm_head(embedding))

    def _lm_head(self, embedding: Tensor) -> Tensor | QuantizedLinear:
        tied = self._config.tie_word_embeddings
        kept = self._kept([self.names.embedding if tied else "lm_head.weight"])
        if kept is not None:
            return kept[0]
        return embedding if tied else self.tensor("lm_head.weight", *embedding.shape)

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

    def _linear(self, prefix: str, names: Sequence[str], sizes: list[int], inputs: int, *, bias: bool) -> Matrix:
        """A layer of ``sum(sizes)`` outputs; the checkpoint holds them in so many tensors or in a single one."""
        sizes = sizes if len(names) > 1 else [sum(sizes)]
        biases = self._empty(sum(sizes)) if bias else None
        if biases is not None:
            self._register(prefix, names, "bias", torch.split(biases, sizes))
        kept = self._kept([f"{prefix}{name}.weight" for name in names])
        if kept is not None:
            return join_records(kept, biases)
        weight = self._empty(sum(sizes), inputs)
        self._register(prefix, names, "weight", torch.split(weight, sizes))
        return Linear(weight, biases)

    def _kept(self, names: Sequence[str]) -> list[QuantizedLinear] | None:
        """The records of matrices that are multiplied together; None unless each has one."""
        if self._record is None:
            return None
        found = []
        for name in names:
            record = self._record(name)
            if record is None:
                return None
            found.append(record)
        return found

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
