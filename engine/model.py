"""The forward pass of a decoder over the flattened tokens of a step.

Written against plain tensors: at batch 32 a small model spends most of a step on operator calls, so there are as
few of them as the arithmetic allows. Numerics follow transformers' models of the same architectures.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention import StepAttention, StepLayout
from engine.kv_pool import KVPool
from engine.model_config import ModelConfig
from engine.rotary import rotary_tables
from engine.rotary_config import RotaryConfig
from engine.weights import LayerWeights, Linear, ModelWeights, Norm

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary embedding, each ``[rows, 1, rotary_dim]``."""


class DecoderModel:
    """A model ready to run.

    Args:
        max_len: Longest sequence to be run, in tokens; the rotary tables are made for it.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, max_len: int) -> None:
        self.config = config
        self.weights = weights
        self._tables = _tables(config.rotary, max_len, weights.embedding.dtype)

    def forward(self, layout: StepLayout, pool: KVPool, attention: StepAttention) -> Tensor:
        """Runs a step: writes its keys and values into the pool.

        Returns:
            Logits of ``layout.sample_rows``, float32 ``[R, vocab]``.
        """
        hidden = F.embedding(layout.token_ids, self.weights.embedding)
        if self.weights.positions is not None:
            hidden += self.weights.positions.index_select(0, layout.positions)
        rotation = None
        if self._tables is not None:
            cos, sin = self._tables
            rotation = cos.index_select(0, layout.positions), sin.index_select(0, layout.positions)
        for i, layer in enumerate(self.weights.layers):
            normed = self._norm(hidden, layer.input_norm)
            hidden += self._attention(i, layer, normed, layout.slot_ids, rotation, pool, attention)
            normed = self._norm(hidden, layer.post_norm)
            hidden += self._mlp(layer, normed)
        return self._logits(hidden, layout.sample_rows)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        normed: Tensor,
        slot_ids: Tensor,
        rotation: Rotation | None,
        pool: KVPool,
        attention: StepAttention,
    ) -> Tensor:
        num_heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = _linear(normed, layer.qkv).view(len(normed), num_heads + 2 * kv_heads, self.config.head_dim)
        value = qkv[:, num_heads + kv_heads :]
        heads = self._head_norms(qkv[:, : num_heads + kv_heads], layer)
        if rotation is not None:
            heads = _rotate(heads, rotation)
        query, key = heads[:, :num_heads], heads[:, num_heads:]
        pool.keys[index].index_copy_(0, slot_ids, key)
        pool.values[index].index_copy_(0, slot_ids, value)
        return _linear(attention.attend(index, query, key, value), layer.out)

    def _head_norms(self, heads: Tensor, layer: LayerWeights) -> Tensor:
        """RMSNorm of each head (``[T, heads + kv_heads, head_dim]``), where the model has it."""
        if layer.q_norm is None or layer.k_norm is None:
            return heads
        normed = F.rms_norm(heads, (self.config.head_dim,), None, self.config.norm_eps)
        normed[:, : self.config.num_attention_heads].mul_(layer.q_norm)
        normed[:, self.config.num_attention_heads :].mul_(layer.k_norm)
        return normed

    def _mlp(self, layer: LayerWeights, normed: Tensor) -> Tensor:
        up = _linear(normed, layer.up)
        if self.config.activation == "silu":
            gate, up = up.chunk(2, -1)
            return _linear(F.silu(gate).mul_(up), layer.down)
        return _linear(F.relu(up) if self.config.activation == "relu" else F.gelu(up), layer.down)

    def _norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """RMSNorm's weight is multiplied after rounding to the model's dtype, as transformers does."""
        shape, eps = (self.config.hidden_size,), self.config.norm_eps
        if self.config.norm == "layer":
            return F.layer_norm(hidden, shape, norm.weight, norm.bias, eps)
        return F.rms_norm(hidden, shape, None, eps).mul_(norm.weight)

    def _logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        hidden = hidden.index_select(0, rows)
        if self.weights.norm is not None:
            hidden = self._norm(hidden, self.weights.norm)
        return F.linear(hidden, self.weights.lm_head).float()


def _tables(config: RotaryConfig | None, max_len: int, dtype: torch.dtype) -> Rotation | None:
    """The first half of the sines carries the minus sign of ``rotate_half``: rotating needs only a swap of halves."""
    if config is None:
        return None
    cos, sin = rotary_tables(config, max_len, dtype)
    sin[:, : config.rotary_dim // 2].neg_()
    return cos[:, None], sin[:, None]


def _rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotary embedding of ``[T, n, head_dim]``; where it does not turn the whole head, in place."""
    cos, sin = rotation
    rotary_dim = cos.shape[-1]
    if rotary_dim == heads.shape[-1]:
        return torch.addcmul(heads * cos, heads.roll(rotary_dim // 2, -1), sin)
    turned = heads[..., :rotary_dim]
    turned.copy_(torch.addcmul(turned * cos, turned.roll(rotary_dim // 2, -1), sin))
    return heads


def _linear(rows: Tensor, layer: Linear) -> Tensor:
    return F.linear(rows, layer.weight, layer.bias)
