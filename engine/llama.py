"""The forward pass of a Llama model over the flattened tokens of a step.

Written against plain tensors: at batch 32 a small model spends most of a step on operator calls, so there are as
few of them as the arithmetic allows. Numerics follow transformers' ``LlamaForCausalLM``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention import StepAttention, StepLayout
from engine.kv_pool import KVPool
from engine.model_config import LlamaConfig
from engine.weights import LayerWeights, LlamaWeights


class LlamaModel:
    """A model ready to run.

    Args:
        max_len: Longest sequence to be run, in tokens; the rotary tables are made for it.
    """

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, max_len: int) -> None:
        self.config = config
        self.weights = weights
        self._cos, self._sin = rotary_tables(config, max_len, weights.embedding.dtype)

    def forward(self, layout: StepLayout, pool: KVPool, attention: StepAttention) -> Tensor:
        """Runs a step: writes its keys and values into the pool.

        Returns:
            Logits of ``layout.sample_rows``, float32 ``[R, vocab]``.
        """
        hidden = F.embedding(layout.token_ids, self.weights.embedding)
        cos = self._cos.index_select(0, layout.positions)
        sin = self._sin.index_select(0, layout.positions)
        for i, layer in enumerate(self.weights.layers):
            normed = self._norm(hidden, layer.input_norm)
            hidden += self._attention(i, layer, normed, layout.slot_ids, cos, sin, pool, attention)
            normed = self._norm(hidden, layer.post_norm)
            hidden += _mlp(layer, normed)
        return self._logits(hidden, layout.sample_rows)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        normed: Tensor,
        slot_ids: Tensor,
        cos: Tensor,
        sin: Tensor,
        pool: KVPool,
        attention: StepAttention,
    ) -> Tensor:
        num_heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = F.linear(normed, layer.qkv).view(len(normed), num_heads + 2 * kv_heads, self.config.head_dim)
        rotated = _rotate(qkv[:, : num_heads + kv_heads], cos, sin)
        query, key, value = rotated[:, :num_heads], rotated[:, num_heads:], qkv[:, num_heads + kv_heads :]
        pool.keys[index].index_copy_(0, slot_ids, key)
        pool.values[index].index_copy_(0, slot_ids, value)
        return F.linear(attention.attend(index, query, key, value), layer.out)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm; the weight is multiplied after rounding to the model's dtype, as transformers does."""
        return F.rms_norm(hidden, (self.config.hidden_size,), None, self.config.rms_norm_eps).mul_(weight)

    def _logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        normed = self._norm(hidden.index_select(0, rows), self.weights.norm)
        return F.linear(normed, self.weights.lm_head).float()


def rotary_tables(config: LlamaConfig, max_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding by position, each ``[max_len, 1, head_dim]``.

    The two halves of a head are turned against each other (transformers' ``rotate_half``): the first half of the
    sines carries the minus sign, so that rotating needs only a swap of the halves.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1)[:, None].to(dtype), torch.cat([-sin, sin], -1)[:, None].to(dtype)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``[T, n, head_dim]``."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def _mlp(layer: LayerWeights, normed: Tensor) -> Tensor:
    gate, up = F.linear(normed, layer.gate_up).chunk(2, -1)
    return F.linear(F.silu(gate).mul_(up), layer.down)
