"""The layers of a decoder of any family by the kernels between its matrix products; needs Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farsight.engine.attention.attention import StepAttention, StepLayout
from farsight.engine.checkpoint.layers import ExpertWeights, LayerWeights, Norm
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.kv_pool import KVPool
from farsight.engine.models.fused import add_norm, gated, rotate_and_store
from farsight.engine.models.grouped import GroupedExperts
from farsight.engine.models.layers import DecoderLayers, Rotation, latent_heads, latent_values, linear


class FusedLayers(DecoderLayers):
    """The same numbers as ``DecoderLayers``, of a whole model."""

    def __init__(self, config: DecoderConfig, layers: Sequence[LayerWeights], max_len: int, like: Tensor) -> None:
        super().__init__(config, layers, max_len, like)
        # By the weights of a layer: those are kept as long as the layers.
        self._grouped = {id(each.experts): GroupedExperts.of(each.experts) for each in layers if each.experts}
        self._each_head = [_of_each_head(layer, config) for layer in layers]

    @property
    def recordable(self) -> bool:
        return all(each is not None for each in self._grouped.values())

    def run(self, hidden: Tensor, layout: StepLayout, pool: KVPool, attention: StepAttention) -> Tensor:
        blocks, latent = self.config.blocks, self.config.latent
        tables, positions = self._tables, layout.positions
        if layout.given is not None and layout.given.positions is not None:
            tables = self._rotation(layout)
            positions = torch.arange(len(positions), device=positions.device)
        delta: Tensor | None = None
        after: Norm | None = None
        self.middle = None
        for i, layer in enumerate(self._layers):
            normed = self._norm(hidden, delta, after, layer.input_norm)
            self._keep_middle(i, hidden)
            own_tables = tables if self._layer_tables is None else self._layer_tables[i]
            query, key, value = self._turned(i, linear(normed, layer.qkv), own_tables, positions, layout, pool)
            attended = attention.attend(i, self._scaled_queries(query, layout), key, value, layer.sinks)
            if latent is not None and layer.latent is not None:
                attended = latent_values(latent, layer.latent, attended)
            out = self._add_up(linear(attended, layer.out))
            if blocks.parallel:  # both read the stream before either adds to it
                if layer.post_norm is not layer.input_norm:
                    normed = self._norm(hidden, None, None, layer.post_norm)
                self._norm(hidden, out, layer.after_attention, None)
            else:
                normed = self._norm(hidden, out, layer.after_attention, layer.post_norm)
            delta, after = self._add_up(self._mlp(layer, normed)), layer.after_mlp
        self._norm(hidden, delta, after, None)
        return hidden

    def _norm(self, hidden: Tensor, delta: Tensor | None, after: Norm | None, norm: Norm | None) -> Tensor:
        config = self.config
        return add_norm(
            hidden,
            delta,
            norm,
            config.norm_eps,
            after=after,
            factor=config.blocks.residual_scale,
            layer=config.norm == "layer",
        )

    def _turned(
        self, i: int, made: Tensor, rotation: Rotation | None, positions: Tensor, layout: StepLayout, pool: KVPool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values, each ``[T, heads, head_dim]``; the last two are in the pool then."""
        config, layer = self.config, self._layers[i]
        num_heads, kv_heads, value = config.num_attention_heads, config.num_key_value_heads, None
        if config.latent is not None and layer.latent is not None:
            heads = latent_heads(config.latent, layer.latent, made)
        else:
            whole = made.view(len(made), num_heads + 2 * kv_heads, config.head_dim)
            heads, value = whole[:, : num_heads + kv_heads], whole[:, num_heads + kv_heads :]
            if config.blocks.head_norm == "all":
                heads = self._head_norms(heads, layer)
        pages = pool.keys[i], pool.values[i]
        rotate_and_store(heads, value, rotation, positions, layout.slot_ids, pages, self._each_head[i], config.norm_eps)
        key = heads[:, num_heads:]
        return heads[:, :num_heads], key, key if value is None else value

    def _activated(self, up: Tensor) -> Tensor:
        blocks = self.config.blocks
        return gated(up, self.config.activation, blocks.clamp) if blocks.gated else super()._activated(up)

    def _of_experts(self, weights: ExpertWeights, normed: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
        grouped = self._grouped[id(weights)]
        if grouped is None:
            return super()._of_experts(weights, normed, chosen, factors)
        return grouped.mixed(normed, chosen, factors, self._activated)


def _of_each_head(layer: LayerWeights, config: DecoderConfig) -> Tensor | None:
    """Returns the weights that the norm of each head has, ``[2, head_dim]``; None without such norms."""
    if config.blocks.head_norm != "each" or layer.q_norm is None or layer.k_norm is None:
        return None
    return torch.stack([layer.q_norm, layer.k_norm])
