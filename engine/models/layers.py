"""The layers of a decoder, in torch operations: their linear layers, latent attention and mixtures of experts too."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from farsight.engine.attention.attention import StepAttention, StepLayout
from farsight.engine.checkpoint.families.record import Experts, Latent
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.checkpoint.rotary_config import RotaryConfig
from farsight.engine.checkpoint.weights import ExpertWeights, LatentWeights, LayerWeights, Matrix, Norm
from farsight.engine.kv_pool import KVPool
from farsight.engine.models.rotary import rotary_tables
from farsight.engine.step_results import IterationCutOff


def linear(rows: Tensor, layer: Matrix) -> Tensor:
    """Computes a layer of ``rows``, ``[T, outputs]``; unpacks quantised weights each time: slow, and the reference."""
    return F.linear(rows, layer.dense(rows.dtype), layer.bias)


EPS = 1e-6
"""The norms of latents have it, whatever that of the model's other norms is."""


def latent_heads(latent: Latent, weights: LatentWeights, made: Tensor) -> Tensor:
    """Returns queries of all heads and the token's row behind them, ``[T, heads + 1, latent.width]``, not turned yet.

    Args:
        made: The product with the layer's first matrix: queries or what they are made of, then the row.
    """
    query, row = torch.split(made, [made.shape[1] - latent.width, latent.width], -1)
    if weights.q_up is not None and weights.q_norm is not None:
        query = linear(_norm(query, weights.q_norm), weights.q_up)
    query = query.view(len(query), -1, latent.query)
    turned, plain = torch.split(query, [latent.turned, latent.plain], -1)
    reached = torch.einsum("thp,hpr->thr", plain, weights.keys)
    row_turned, row_latent = torch.split(row, [latent.turned, latent.rank], -1)
    own = torch.cat([row_turned, _norm(row_latent, weights.kv_norm)], -1)
    return torch.cat([torch.cat([turned, reached], -1), own[:, None]], 1)


def latent_values(latent: Latent, weights: LatentWeights, attended: Tensor) -> Tensor:
    """Sums of values, ``[T, heads * latent.value]``, of sums of rows, ``[T, heads * latent.width]``."""
    sums = attended.view(len(attended), -1, latent.width)[..., latent.turned :]
    return torch.einsum("thr,hvr->thv", sums, weights.values).flatten(1)


def _norm(values: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(values, values.shape[-1:], None, EPS) * weight


_LEAST = 1e-20
"""Added to sums that are divided by: a sigmoid may be 0."""


def route(experts: Experts, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token, best first, and their weights in float32: each ``[T, active]``.

    Args:
        logits: The router's, float32 ``[T, experts]``.
        correction: As of ``ExpertWeights``.
    """
    scores = logits.softmax(-1) if experts.scores == "softmax" else logits.sigmoid()
    wanted = scores if correction is None else scores + correction
    if experts.groups > 1:
        wanted = _of_best_groups(experts, wanted)
    chosen = wanted.topk(experts.active, -1).indices
    weights = scores.gather(-1, chosen)
    if experts.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST)
    return chosen, weights * experts.scale


def _of_best_groups(experts: Experts, scores: Tensor) -> Tensor:
    """Returns the scores of a token's best groups; -inf for those of the others."""
    groups = scores.view(len(scores), experts.groups, -1)
    sums = groups.topk(experts.group_best, -1).values.sum(-1)
    taken = sums.topk(experts.active_groups, -1).indices
    others = torch.ones_like(sums, dtype=torch.bool).scatter_(-1, taken, value=False)
    return groups.masked_fill(others[..., None], float("-inf")).flatten(-2)


def mix(
    experts: Experts,
    weights: ExpertWeights,
    normed: Tensor,
    shared: Tensor | None,
    of_experts: Callable[[ExpertWeights, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Returns what the experts that are here add to the residual stream, ``[T, hidden]``.

    Args:
        normed: Input of the router and of the experts, ``[T, hidden]``.
        shared: What the experts that every token takes make of it; None without.
        of_experts: Computes what the chosen ones make of it, by what ``route`` returns.
    """
    logits = linear(normed, weights.router).float()
    chosen, factors = route(experts, logits[:, : experts.count], weights.correction)
    mixed = of_experts(weights, normed, chosen, factors)
    if shared is None:
        return mixed
    if experts.shared_gate:
        shared = shared * logits[:, experts.count :].sigmoid().to(shared.dtype)
    return mixed + shared


Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary embedding, each ``[rows, 1, rotary_dim]``."""

BeforeAttention = Callable[[LayerWeights, Tensor, Rotation | None], tuple[Tensor, Tensor, Tensor]]
AfterAttention = Callable[[LayerWeights, Tensor, Tensor], Tensor]


def _whole(partial: Tensor) -> Tensor:
    return partial


class DecoderLayers:
    """Consecutive layers of a model, or one rank's share of their heads and columns.

    Args:
        config: Its heads, windows and sizes are those of ``layers``.
        max_len, compiled: As of ``DecoderModel``.
        like: Anything in the dtype and on the device of the weights.
        add_up: Sums this rank's part of what attention and MLP add to the residual stream with the parts of the others.
            A whole model needs no sum.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[LayerWeights],
        max_len: int,
        like: Tensor,
        *,
        compiled: bool = False,
        add_up: Callable[[Tensor], Tensor] = _whole,
    ) -> None:
        self.config = config
        self.cut_off_at_s = math.inf
        self.middle_rows: Tensor | None = None
        """Rows of the next step whose states behind half of the layers are wanted; None for none."""
        self.middle: Tensor | None = None
        """These states of the last step, float32 ``[R, hidden]``."""
        self.inputs: Tensor | None = None
        """What each layer of the next step gets beside the stream, ``[T, layers, inputs]``; None for nothing."""
        self._layers = layers
        self._add_up = add_up
        self._before: BeforeAttention = self._heads
        self._after: AfterAttention = self._rest_of_layer
        if compiled:
            self._before = torch.compile(self._heads, dynamic=True)
            self._after = torch.compile(self._rest_of_layer, dynamic=True)
        self._tables = _tables(config.rotary, max_len, like)
        self._layer_tables: list[Rotation | None] | None = None
        if config.rotaries is not None:
            tables = {rotary: _tables(rotary, max_len, like) for rotary in set(config.rotaries)}
            self._layer_tables = [tables[rotary] for rotary in config.rotaries]

    @property
    def recordable(self) -> bool:
        """Whether the work of a step depends on its size alone; here the host asks which experts compute."""
        return self.config.experts is None

    def run(self, hidden: Tensor, layout: StepLayout, pool: KVPool, attention: StepAttention) -> Tensor:
        """Returns ``hidden`` (``[T, hidden]``, overwritten) behind the last of the layers."""
        rotation = self._rotation(layout)
        self.middle = None
        for i, layer in enumerate(self._layers):
            self._keep_middle(i, hidden)
            if self.cut_off_at_s < math.inf and time.monotonic() >= self.cut_off_at_s:
                raise IterationCutOff
            if self._layer_tables is not None:
                rotation = rows_of(self._layer_tables[i], layout.positions)
            query, key, value = self._before(layer, hidden, rotation)
            query = self._scaled_queries(query, layout)
            pool.keys[i].index_copy_(0, layout.slot_ids, key)
            pool.values[i].index_copy_(0, layout.slot_ids, value)
            hidden = self._after(layer, hidden, attention.attend(i, query, key, value, layer.sinks))
        return hidden

    def _scaled_queries(self, query: Tensor, layout: StepLayout) -> Tensor:
        """Multiplies queries with what their positions ask for."""
        scale = self.config.blocks.query_scale
        if scale is None:
            return query
        factors = 1 + scale.beta * torch.log1p(torch.floor(layout.positions / scale.length))
        return query * factors.to(query.dtype)[:, None, None]

    def _keep_middle(self, index: int, hidden: Tensor) -> None:
        """Keeps the wanted rows before the layer ``index``, if that begins the second half."""
        if self.middle_rows is not None and index == len(self._layers) // 2:
            self.middle = hidden.index_select(0, self.middle_rows).float()

    def _rotation(self, layout: StepLayout) -> Rotation | None:
        """Returns what turns each row: by its position, or by each of its axes."""
        rotation, given = rows_of(self._tables, layout.positions), layout.given
        if rotation is None or self._tables is None or given is None or given.positions is None:
            return rotation
        rotary = self.config.rotary
        assert rotary is not None and rotary.axes is not None, "positions have axes"
        axes = torch.tensor(rotary.axes * 2, device=given.positions.device)
        columns, positions = torch.arange(len(axes), device=axes.device), given.positions[axes].t()  # [n, rotary_dim]
        for rows, table in zip(rotation, self._tables, strict=True):
            rows[given.rows, 0] = table[:, 0][positions, columns]
        return rotation

    def _heads(self, layer: LayerWeights, hidden: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values of a layer, each ``[T, heads, head_dim]``."""
        num_heads = self.config.num_attention_heads
        normed = hidden if layer.input_norm is None else normalised(hidden, layer.input_norm, self.config)
        made = linear(normed, layer.qkv)
        if self.config.latent is not None and layer.latent is not None:
            heads, value = latent_heads(self.config.latent, layer.latent, made), None
        else:
            heads, value = self._split(made, layer)
        if rotation is not None:
            heads = rotate(heads, rotation)
        key = heads[:, num_heads:]
        return heads[:, :num_heads], key, key if value is None else value

    def _split(self, qkv: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor]:
        """Splits queries and keys, ``[T, heads + kv_heads, head_dim]``, normed where the model has it, from values."""
        num_heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = qkv.view(len(qkv), num_heads + 2 * kv_heads, self.config.head_dim)
        return self._head_norms(qkv[:, : num_heads + kv_heads], layer), qkv[:, num_heads + kv_heads :]

    def _rest_of_layer(self, layer: LayerWeights, hidden: Tensor, attended: Tensor) -> Tensor:
        """Adds the rest of a layer once attention is known; ``hidden`` is changed."""
        if self.config.latent is not None and layer.latent is not None:
            attended = latent_values(self.config.latent, layer.latent, attended)
        before = layer.post_norm
        normed = normalised(hidden, before, self.config) if before is not None and self.config.blocks.parallel else None
        hidden += self._added(linear(attended, layer.out), layer.after_attention)
        if normed is None:
            normed = hidden if before is None else normalised(hidden, before, self.config)
        hidden += self._added(self._mlp(layer, normed), layer.after_mlp)
        return hidden

    def _added(self, partial: Tensor, norm: Norm | None) -> Tensor:
        """Returns what attention or MLP adds to the residual stream."""
        whole, scale = self._add_up(partial), self.config.blocks.residual_scale
        if norm is not None:
            whole = normalised(whole, norm, self.config)
        return whole if scale == 1 else whole * scale

    def _head_norms(self, heads: Tensor, layer: LayerWeights) -> Tensor:
        """Normalises each head (``[T, heads + kv_heads, head_dim]``) by RMSNorm, where the model has it."""
        if layer.q_norm is None or layer.k_norm is None:
            return heads
        num_heads, eps = self.config.num_attention_heads, self.config.norm_eps
        if self.config.blocks.head_norm == "all":
            parts = heads[:, :num_heads].flatten(1), heads[:, num_heads:].flatten(1)
            normed = [F.rms_norm(part, part.shape[1:], None, eps) for part in parts]
            return torch.cat([normed[0] * layer.q_norm, normed[1] * layer.k_norm], 1).view_as(heads)
        each = F.rms_norm(heads, (self.config.head_dim,), None, eps)
        each[:, :num_heads].mul_(layer.q_norm)
        each[:, num_heads:].mul_(layer.k_norm)
        return each

    def _mlp(self, layer: LayerWeights, normed: Tensor) -> Tensor:
        shared = None
        if layer.up is not None and layer.down is not None:
            shared = self._one_mlp(layer.up, layer.down, normed)
        if layer.experts is None:
            assert shared is not None, "a layer has an MLP or experts"
            return shared
        assert self.config.experts is not None, "weights are of the configuration"
        return mix(self.config.experts, layer.experts, normed, shared, self._of_experts)

    def _of_experts(self, weights: ExpertWeights, normed: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
        mixed = torch.zeros_like(normed)
        for expert in sorted(set(chosen.flatten().tolist()).intersection(weights.here)):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            here = expert - weights.first
            part = self._one_mlp(weights.up[here], weights.down[here], normed[rows])
            mixed.index_add_(0, rows, part * factors[rows, place, None].to(part.dtype))
        return mixed

    def _one_mlp(self, first: Matrix, second: Matrix, normed: Tensor) -> Tensor:
        return linear(self._activated(linear(normed, first)), second)

    def _activated(self, up: Tensor) -> Tensor:
        """Returns the input of an MLP's second matrix, of what the first one makes, which may be overwritten."""
        act = ACTIVATION_FUNCTIONS[self.config.activation]
        if not self.config.blocks.gated:
            return act(up)
        gate, up = up.chunk(2, -1)
        clamp = self.config.blocks.clamp
        if clamp is not None:
            gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
            return (up + 1) * (gate * torch.sigmoid(gate * clamp.alpha))
        return act(gate).mul_(up)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATION_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
}


def rows_of(tables: Rotation | None, positions: Tensor) -> Rotation | None:
    if tables is None:
        return None
    cos, sin = tables
    return cos.index_select(0, positions), sin.index_select(0, positions)


def normalised(hidden: Tensor, norm: Norm, config: DecoderConfig) -> Tensor:
    """Normalises rows; RMSNorm's weight is multiplied after rounding to the model's dtype, as transformers does."""
    shape, eps = (config.hidden_size,), config.norm_eps
    if config.norm == "layer":
        return F.layer_norm(hidden, shape, norm.weight, norm.bias, eps)
    return F.rms_norm(hidden, shape, None, eps).mul_(norm.weight)


def _tables(config: RotaryConfig | None, max_len: int, like: Tensor) -> Rotation | None:
    """Returns the rotary tables in the dtype and on the device of ``like``.

    The first half of the sines carries the minus sign of ``rotate_half``: rotating needs only a swap of halves.
    """
    if config is None:
        return None
    cos, sin = rotary_tables(config, max_len, like.dtype)
    sin[:, : config.rotary_dim // 2].neg_()
    return cos[:, None].to(like.device), sin[:, None].to(like.device)


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turns heads, ``[T, n, head_dim]``, by the rotary embedding; where it does not turn the whole head, in place."""
    cos, sin = rotation
    rotary_dim = cos.shape[-1]
    if rotary_dim == heads.shape[-1]:
        return torch.addcmul(heads * cos, heads.roll(rotary_dim // 2, -1), sin)
    turned = heads[..., :rotary_dim]
    turned.copy_(torch.addcmul(turned * cos, turned.roll(rotary_dim // 2, -1), sin))
    return heads
