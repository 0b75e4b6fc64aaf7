"""Weights of 4 bits: the matrices of the layers, rounded after loading. Magnus' baseline VSQ runs on such a model."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from engine.checkpoint.weights import LayerWeights, Linear, ModelWeights, PackedLinear

GROUP = 128
"""Neighbours in a row that share a scale; a row whose length is not a multiple is one group."""

_LARGEST = 7


def pack_weights(weights: ModelWeights) -> ModelWeights:
    """The model with the matrices of its layers in 4 bits; embeddings, norms and biases stay as they are."""
    return dataclasses.replace(weights, layers=tuple(_pack_layer(layer) for layer in weights.layers))


def _pack_layer(layer: LayerWeights) -> LayerWeights:
    qkv, out, up, down = (pack_linear(linear) for linear in (layer.qkv, layer.out, layer.up, layer.down))
    return dataclasses.replace(layer, qkv=qkv, out=out, up=up, down=down)


def pack_linear(linear: Linear | PackedLinear) -> PackedLinear:
    """The layer with its weights in 4 bits."""
    if isinstance(linear, PackedLinear):
        return linear
    weight = linear.weight
    group = GROUP if weight.shape[1] % GROUP == 0 else weight.shape[1]
    groups = weight.view(len(weight), -1, group).float()
    scales = (groups.abs().amax(-1) / _LARGEST).to(weight.dtype)
    return PackedLinear(_nibbles(groups, scales.float()).view(len(weight), -1), scales, linear.bias)


def _nibbles(groups: Tensor, scales: Tensor) -> Tensor:
    steps = (groups / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round_().clamp_(-_LARGEST, _LARGEST)
    halves = (steps + 8).to(torch.uint8).flatten(1)
    return halves[:, ::2] | halves[:, 1::2] << 4
