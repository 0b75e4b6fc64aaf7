"""The forward pass of an encoder over whole texts, and what is made of its hidden states. Torch operations.

Numerics follow transformers' models of the same architectures. Texts are computed together in matrix products, and
apart in attention, so that none of them is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from farsight.engine.checkpoint.encoder_config import EncoderConfig, dense_tensors, encoder_shapes, encoder_tensors
from farsight.engine.checkpoint.gguf_encoder import gguf_encoder_tensors
from farsight.engine.checkpoint.sources import GGUFSource
from farsight.engine.checkpoint.stored import StoredTensor
from farsight.engine.models.layers import ACTIVATION_FUNCTIONS
from farsight.engine.models.rotary import rotary_tables
from farsight.tokenization.gguf_file import is_gguf, read_gguf

_AFTER_POOLING: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Tanh": torch.tanh,
    "Identity": lambda x: x,
    "ReLU": F.relu,
    "GELU": F.gelu,
}


@dataclass(frozen=True, slots=True)
class EncoderText:
    """A text to be encoded.

    Attributes:
        token_ids: At least one, at most ``EncoderConfig.max_len``.
        second_at: Index of the first token of its second part, where two texts are read at once; 0 for none.
    """

    token_ids: Sequence[int]
    second_at: int = 0


class EncoderModel:
    """An encoder ready to run.

    Args:
        weights: By the names of ``encoder_shapes``, in one dtype.
        dense: Weights of the layers behind pooling, by their names; in the same dtype.
    """

    def __init__(
        self, config: EncoderConfig, weights: Mapping[str, Tensor], dense: Sequence[Mapping[str, Tensor]] = ()
    ) -> None:
        self.config = config
        self._weights = weights
        self._dense = dense
        self._act = ACTIVATION_FUNCTIONS[config.activation]
        self._qkv = [self._joined(index) for index in range(config.num_hidden_layers)]
        self._tables: tuple[Tensor, ...] | None = None
        if config.rotary is not None:
            like = weights["embeddings.LayerNorm.weight"]
            tables = rotary_tables(config.rotary, config.max_len, like.dtype)
            self._tables = tuple(table.to(like.device) for table in tables)

    @classmethod
    def from_dir(cls, model_dir: Path, config: EncoderConfig, dtype: torch.dtype) -> EncoderModel:
        """
        Raises:
            CheckpointError: A damaged file, or a missing or odd tensor; names it.
        """
        if is_gguf(model_dir):
            return cls(config, _read_gguf(model_dir, config, dtype))
        weights = _read(encoder_tensors(model_dir, config), dtype)
        dense = [_read(dense_tensors(model_dir, layer), dtype) for layer in config.sentence.dense]
        return cls(config, weights, dense)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """By the names of ``encoder_shapes``."""
        return self._weights

    def to(self, device: torch.device) -> EncoderModel:
        """Returns the same model with its weights on a device."""
        weights = {name: tensor.to(device) for name, tensor in self._weights.items()}
        return EncoderModel(self.config, weights, [{k: v.to(device) for k, v in each.items()} for each in self._dense])

    @torch.inference_mode()
    def hidden(self, texts: Sequence[EncoderText]) -> list[Tensor]:
        """Returns the last hidden states of each text, ``[tokens, hidden]``."""
        return self._hidden(texts)

    def _hidden(self, texts: Sequence[EncoderText]) -> list[Tensor]:
        lengths = [len(text.token_ids) for text in texts]
        hidden, positions = self._embedded(texts)
        for index in range(self.config.num_hidden_layers):
            hidden = self._layer(index, hidden, lengths, positions)
        return list(torch.split(hidden, lengths))

    @torch.inference_mode()
    def embeddings(self, texts: Sequence[EncoderText]) -> Tensor:
        """Computes vectors, float32 ``[texts, dim]``, before they are brought to length 1."""
        if not texts:
            return torch.empty(0, self.config.hidden_size)
        pooling = self.config.sentence.pooling
        pooled = torch.stack([_pooled(hidden, pooling) for hidden in self.hidden(texts)])
        for layer, weights in zip(self.config.sentence.dense, self._dense, strict=True):
            linear = F.linear(pooled, weights["linear.weight"], weights.get("linear.bias"))
            pooled = _AFTER_POOLING[layer.activation](linear)
        return pooled.float()

    @torch.inference_mode()
    def scores(self, texts: Sequence[EncoderText]) -> Tensor:
        """Returns the classifier's logits, float32 ``[texts, num_labels]``."""
        return self.logits(texts)

    def logits(self, texts: Sequence[EncoderText]) -> Tensor:
        """Computes ``scores`` for a training: gradients flow back to those of the weights that want one."""
        first = torch.stack([hidden[0] for hidden in self._hidden(texts)])
        if self.config.record.classifier == "pooled":
            return self._linear("classifier", torch.tanh(self._linear("pooler.dense", first))).float()
        return self._linear("classifier.out_proj", torch.tanh(self._linear("classifier.dense", first))).float()

    def _embedded(self, texts: Sequence[EncoderText]) -> tuple[Tensor, Tensor]:
        """Returns the rows that the first layer reads, and their positions."""
        first, weights = self.config.first_position, self._weights
        device = weights["embeddings.LayerNorm.weight"].device
        ids = torch.tensor([token for text in texts for token in text.token_ids], device=device)
        positions = torch.cat([torch.arange(first, first + len(text.token_ids), device=device) for text in texts])
        types = torch.tensor([kind for text in texts for kind in self._types(text)], device=device)
        hidden = F.embedding(ids, weights["embeddings.word_embeddings.weight"])
        hidden = hidden + F.embedding(types, weights["embeddings.token_type_embeddings.weight"])
        if self._tables is None:
            hidden = hidden + F.embedding(positions, weights["embeddings.position_embeddings.weight"])
        return self._norm("embeddings.LayerNorm", hidden), positions

    def _types(self, text: EncoderText) -> list[int]:
        """Returns 0, and 1 for tokens of the second text, where the model tells two texts apart: RoBERTa does not."""
        length = len(text.token_ids)
        if not text.second_at or self.config.type_vocab_size < 2 or self.config.record.after_padding:
            return [0] * length
        return [0] * text.second_at + [1] * (length - text.second_at)

    def _layer(self, index: int, hidden: Tensor, lengths: list[int], positions: Tensor) -> Tensor:
        name, heads = f"encoder.layer.{index}.", self.config.num_attention_heads
        weight, bias = self._qkv[index]
        qkv = F.linear(hidden, weight, bias).view(len(hidden), 3, heads, -1)
        if self._tables is not None:
            qkv[:, :2] = _turned(qkv[:, :2], *(table[positions, None, None] for table in self._tables))
        attended = [_attend(part).reshape(len(part), -1) for part in torch.split(qkv, lengths)]
        added = self._linear(f"{name}attention.output.dense", torch.cat(attended))
        hidden = self._norm(f"{name}attention.output.LayerNorm", added + hidden)
        first, *second = (self._linear(name + each, hidden) for each in self.config.record.up)
        inner = self._act(first)
        for up in second:
            inner = inner * up
        return self._norm(f"{name}output.LayerNorm", self._linear(f"{name}output.dense", inner) + hidden)

    def _joined(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Returns weight and bias of queries, keys and values as one product."""
        record = self.config.record
        parts = [f"encoder.layer.{index}.attention.self.{each}" for each in record.qkv]
        weight = torch.cat([self._weights[f"{part}.weight"] for part in parts])
        return weight, torch.cat([self._weights[f"{part}.bias"] for part in parts]) if record.biased else None

    def _linear(self, name: str, rows: Tensor) -> Tensor:
        return F.linear(rows, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return F.layer_norm(rows, (self.config.hidden_size,), weight, bias, self.config.norm_eps)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns values turned by their positions' angles, the halves of a head against each other."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _attend(qkv: Tensor) -> Tensor:
    """Returns attention of one text, ``[tokens, heads, head_dim]``; every token attends to all.

    Args:
        qkv: ``[tokens, 3, heads, head_dim]``.
    """
    query, key, value = qkv.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)  # each [1, heads, tokens, head_dim]
    return F.scaled_dot_product_attention(query, key, value)[0].transpose(0, 1)


def _pooled(hidden: Tensor, pooling: str) -> Tensor:
    if pooling == "mean":
        return hidden.mean(0)
    return hidden[-1] if pooling == "last" else hidden[0]


def _read_gguf(path: Path, config: EncoderConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = gguf_encoder_tensors(read_gguf(path), encoder_shapes(config))
    source = GGUFSource(path, tensors, {})
    return {name: source.rows(name).to(dtype) for name in tensors}


def _read(tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted({tensor.file for tensor in tensors.values()}):
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name, tensor in tensors.items():
                if tensor.file == file:
                    found[name] = opened.get_tensor(tensor.name).to(dtype)
    return found
