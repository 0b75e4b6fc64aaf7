"""Layers of different shapes in torch operations: attention of several sizes, or a state in its place.

States are computed token by token, whatever the step holds: a prompt in one step or in ten, alone or beside others,
makes the same state. They stay in float32.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.nn import functional as F

from farsight.engine.attention.attention import StepAttention, StepLayout
from farsight.engine.checkpoint.families.mixers import DeltaNet, Mixer, ShortConvolution
from farsight.engine.checkpoint.families.record import LayerShape
from farsight.engine.checkpoint.weights import BesideWeights, ExpertWeights, LayerWeights, MixerWeights
from farsight.engine.kv_pool import KVPool, StatePool
from farsight.engine.models.layers import (
    ACTIVATION_FUNCTIONS,
    EPS,
    DecoderLayers,
    Rotation,
    linear,
    mix,
    normalised,
    rotate,
    rows_of,
)
from farsight.engine.step_results import IterationCutOff


class MixedLayers(DecoderLayers):
    """The layers of a model whose layers differ (``DecoderConfig.shapes``), all of them on one rank."""

    @property
    def recordable(self) -> bool:
        return False

    def run(self, hidden: Tensor, layout: StepLayout, pool: KVPool, attention: StepAttention) -> Tensor:
        """See ``DecoderLayers.run``."""
        rotation = self._rotation(layout)
        spans = [] if pool.states is None else spans_of(layout)
        self.middle = None
        for i, layer in enumerate(self._layers):
            self._keep_middle(i, hidden)
            if time.monotonic() >= self.cut_off_at_s:
                raise IterationCutOff
            if self._layer_tables is not None:
                rotation = rows_of(self._layer_tables[i], layout.positions)
            normed = hidden if layer.input_norm is None else normalised(hidden, layer.input_norm, self.config)
            made, shape = linear(normed, layer.qkv), self.config.shape(i)
            if layer.mixer is not None and shape.mixer is not None and pool.states is not None:
                mixed = self._mixed(made, shape.mixer, layer.mixer, pool.states, i, spans)
            else:
                mixed = self._attended(i, made, rotation, layout, pool, attention)
            hidden = self._rest_of_layer(layer, hidden, mixed)
            if layer.inputs is not None and self.inputs is not None:
                act = ACTIVATION_FUNCTIONS[self.config.activation]
                own = act(linear(hidden, layer.inputs.gate)) * self.inputs[:, i]
                hidden = hidden + normalised(linear(own, layer.inputs.projection), layer.inputs.norm, self.config)
            if layer.scale is not None:
                hidden = hidden * layer.scale
        return hidden

    def _attended(
        self,
        index: int,
        made: Tensor,
        rotation: Rotation | None,
        layout: StepLayout,
        pool: KVPool,
        attention: StepAttention,
    ) -> Tensor:
        """Returns what attention gives, ``[T, heads * head_dim]``, and writes the layer's own keys and values."""
        config, layer, shape = self.config, self._layers[index], self.config.shape(index)
        heads, kv = config.num_attention_heads, 0 if shape.kv_of is not None else shape.kv_heads
        each = made.view(len(made), -1, shape.head_dim)
        query, key, value, gate = torch.split(each, [heads, kv, kv, each.shape[1] - heads - 2 * kv], 1)
        query = self._turned(query, layer.q_norm, shape, rotation)
        if kv:
            key = self._turned(key, layer.k_norm, shape, rotation)
            if config.blocks.value_norm:
                value = F.rms_norm(value, (shape.head_dim,), None, config.norm_eps)
            pool.keys[index].index_copy_(0, layout.slot_ids, key.to(pool.dtype))
            pool.values[index].index_copy_(0, layout.slot_ids, value.to(pool.dtype))
        else:  # a whole prompt reads the step's own
            key, value = (cache.index_select(0, layout.slot_ids) for cache in (pool.keys[index], pool.values[index]))
        attended = attention.attend(index, query, key, value, layer.sinks)
        return attended if not gate.shape[1] else attended * torch.sigmoid(gate.flatten(1))

    def _turned(self, heads: Tensor, norm: Tensor | None, shape: LayerShape, rotation: Rotation | None) -> Tensor:
        if norm is not None:
            heads = (F.rms_norm(heads, (shape.head_dim,), None, self.config.norm_eps) * norm).to(heads.dtype)
        return heads if rotation is None else rotate(heads.clone(), rotation)

    def _rest_of_layer(self, layer: LayerWeights, hidden: Tensor, attended: Tensor) -> Tensor:
        if layer.experts is None or layer.experts.beside is None:
            return super()._rest_of_layer(layer, hidden, attended)
        hidden = hidden + self._added(linear(attended, layer.out), layer.after_attention)
        assert layer.post_norm is not None and layer.up is not None and layer.down is not None, "a layer of Gemma 4"
        plain = self._one_mlp(layer.up, layer.down, normalised(hidden, layer.post_norm, self.config))
        mixed = self._beside(layer.experts, layer.experts.beside, hidden)
        whole = normalised(plain, layer.experts.beside.after_mlp, self.config) + mixed
        return hidden + self._added(whole, layer.after_mlp)

    def _beside(self, experts: ExpertWeights, beside: BesideWeights, hidden: Tensor) -> Tensor:
        """Returns what experts beside an MLP give, ``[T, hidden]``."""
        assert self.config.experts is not None, "weights are of the configuration"
        read = (F.rms_norm(hidden, hidden.shape[-1:], None, self.config.norm_eps) * beside.router).to(hidden.dtype)
        normed = normalised(hidden, beside.before, self.config)

        def given(weights: ExpertWeights, _: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
            return self._of_experts(weights, normed, chosen, factors * beside.scales[chosen])

        return normalised(mix(self.config.experts, experts, read, None, given), beside.after, self.config)

    def _mixed(
        self, made: Tensor, mixer: Mixer, weights: MixerWeights, states: StatePool, layer: int, spans: list[Span]
    ) -> Tensor:
        """Returns the inputs of the layer's last matrix, ``[T, mixed]``, and brings the states forward."""
        rows, of_layer = made.float(), states.of_layer(layer)
        out = torch.empty(len(rows), mixer.mixed)
        for first, count, row, kept in spans:
            state = of_layer[row]
            out[first : first + count] = _one_sequence(
                rows[first : first + count], mixer, weights, state, self.config.norm_eps
            )
            if kept is not None:
                of_layer[kept] = state
        return out.to(made.dtype)


Span = tuple[int, int, int, int | None]
"""First row of a step, number of rows, the row of their state, and that in which it is kept behind them."""


def spans_of(layout: StepLayout) -> list[Span]:
    """Returns the rows of each item of a step, cut where its state is kept."""
    assert layout.state_rows is not None, "a model with states has rows for them"
    counts = [1] * layout.num_decode + list(() if layout.prefill is None else layout.prefill.chunk_lens)
    found: list[Span] = []
    first = 0
    for i, (count, row) in enumerate(zip(counts, layout.state_rows, strict=True)):
        done = 0
        for _, read, kept in (each for each in layout.state_keeps if each[0] == i):
            found.append((first + done, read - done, row, kept))
            done = read
        if done < count:
            found.append((first + done, count - done, row, None))
        first += count
    return found


def _one_sequence(rows: Tensor, mixer: Mixer, weights: MixerWeights, state: Tensor, eps: float) -> Tensor:
    """Returns what a mixer makes of rows of one sequence, float32 ``[n, mixed]``; changes its state."""
    kept = (mixer.length - 1) * mixer.convolved
    window = state[:kept].view(mixer.length - 1, mixer.convolved)
    if isinstance(mixer, ShortConvolution):
        before, behind, value = torch.split(rows, list(mixer.outputs), 1)
        mixed: Tensor = behind * _convolved(before * value, window, weights)
        return mixed
    convolved, gate, strength, decay = torch.split(rows, list(mixer.outputs), 1)
    ready = F.silu(_convolved(convolved, window, weights))
    memory = state[kept:].view(mixer.value_heads, mixer.key, mixer.value)
    found = _delta(ready, strength.sigmoid(), decay, mixer, weights, memory)
    assert weights.norm is not None, "the delta rule has a norm"
    normed = F.rms_norm(found, (mixer.value,), None, eps) * weights.norm
    return (normed * F.silu(gate.view_as(normed))).flatten(1)


def _convolved(rows: Tensor, window: Tensor, weights: MixerWeights) -> Tensor:
    """Convolves rows of a sequence, ``[n, channels]``, behind those that its window keeps; moves the window on.

    The products of a row are added from the oldest on.
    """
    whole = torch.cat([window, rows])
    count, taps = len(rows), weights.taps
    out = whole[:count] * taps[0]
    for i in range(1, len(taps)):
        out = out + whole[i : i + count] * taps[i]
    window.copy_(whole[count:])
    return out if weights.bias is None else out + weights.bias


def _delta(
    ready: Tensor, strength: Tensor, decay: Tensor, mixer: DeltaNet, weights: MixerWeights, memory: Tensor
) -> Tensor:
    """The gated delta rule, token by token; ``[n, value_heads, value]``.

    Args:
        ready: Queries, keys and values, ``[n, convolved]``.
        strength, decay: ``[n, value_heads]``.
        memory: ``[value_heads, key, value]``; changed.
    """
    keys = mixer.key_heads * mixer.key
    query, key, value = torch.split(ready, [keys, keys, mixer.mixed], 1)
    shared = mixer.value_heads // mixer.key_heads
    heads = (_unit(each.view(len(ready), -1, mixer.key)) for each in (query, key))
    query, key = (each.repeat(1, shared, 1) if mixer.tiled else each.repeat_interleave(shared, 1) for each in heads)
    query, value = query * mixer.key**-0.5, value.view(len(ready), -1, mixer.value)
    assert weights.rates is not None and weights.steps is not None, "the delta rule has rates"
    kept = (weights.rates * F.softplus(decay + weights.steps)).exp()
    out = torch.empty_like(value)
    for i in range(len(ready)):
        memory *= kept[i, :, None, None]
        known = (memory * key[i, :, :, None]).sum(1)
        memory += key[i, :, :, None] * ((value[i] - known) * strength[i, :, None])[:, None]
        out[i] = (memory * query[i, :, :, None]).sum(1)
    return out


def _unit(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + EPS)
