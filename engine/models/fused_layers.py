"""Decoder layers on a GPU, with fewer and larger kernels between their matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.attention import StepAttention, StepLayout
from engine.checkpoint.model_config import DecoderConfig
from engine.kv.kv_pool import KVPool
from engine.models import fused
from engine.models.layers import DecoderLayers
from engine.models.linear import linear


def can_fuse(config: DecoderConfig) -> bool:
    """Whether there are kernels for such layers."""
    return config.norm == "rms" and config.activation == "silu" and config.rotary is not None and config.plain


class FusedLayers(DecoderLayers):
    """The same numbers as ``DecoderLayers``, for models that ``can_fuse`` accepts."""

    def run(self, hidden: Tensor, layout: StepLayout, pool: KVPool, attention: StepAttention) -> Tensor:
        """See ``DecoderLayers.run``."""
        assert self._tables is not None, "rotary"
        eps, delta = self.config.norm_eps, None
        tables, positions = self._tables, layout.positions
        if layout.given is not None and layout.given.positions is not None:
            rotation = self._rotation(layout)
            assert rotation is not None, "rotary"
            tables, positions = rotation, torch.arange(len(positions), device=positions.device)
        for i, layer in enumerate(self._layers):
            assert layer.input_norm is not None and layer.post_norm is not None, "plain"
            assert layer.up is not None and layer.down is not None, "plain"
            normed = fused.add_norm(hidden, delta, layer.input_norm.weight, eps)
            heads, value = self._split(linear(normed, layer.qkv), layer)
            pages = pool.keys[i], pool.values[i]
            fused.rotate_and_store(heads, value, tables, positions, layout.slot_ids, pages)
            num_heads = self.config.num_attention_heads
            attended = attention.attend(i, heads[:, :num_heads], heads[:, num_heads:], value)
            normed = fused.add_norm(hidden, self._add_up(linear(attended, layer.out)), layer.post_norm.weight, eps)
            delta = self._add_up(linear(fused.gated(linear(normed, layer.up)), layer.down))
        if delta is not None:
            hidden += delta
        return hidden
