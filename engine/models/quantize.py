"""Rounds the matrices of a model to 8 or 4 bits after loading."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from farsight.engine.checkpoint.quantized import NIBBLE_CENTER, JoinedLinear, QuantizedLinear, pack_nibbles
from farsight.engine.checkpoint.sources import threads_for
from farsight.engine.checkpoint.weights import ExpertWeights, LayerWeights, Linear, Matrix, ModelWeights

logger = logging.getLogger(__name__)

GROUPS = {8: 128, 4: 32}
"""Neighbours that share a scale, by bits; fewer where the length of a row asks for it."""

SMALLEST_GROUP = 16
"""Where no group of this size divides a row, the row is one group."""

LARGEST = 127
ROWS_AT_ONCE = 1024
"""Rows that are rounded together: there are float32 copies of them meanwhile."""


def quantize_weights(weights: ModelWeights, bits: int) -> ModelWeights:
    """Returns the model with the matrices of its layers in ``bits`` and the vocabulary head in 8.

    Embeddings, norms and biases stay as they are, as do matrices that a checkpoint brings in ``bits`` and those whose
    rows are no multiple of 4 long.
    """
    layers = tuple(_quantize_layer(layer, bits) for layer in weights.layers)
    head = weights.lm_head
    if isinstance(head, Tensor):
        rounded = quantize_linear(Linear(head, None), 8)
        head = rounded if isinstance(rounded, QuantizedLinear) else head
    return dataclasses.replace(weights, layers=layers, lm_head=head)


def _quantize_layer(layer: LayerWeights, bits: int) -> LayerWeights:
    qkv, out = quantize_linear(layer.qkv, bits), quantize_linear(layer.out, bits)
    up, down = (None if linear is None else quantize_linear(linear, bits) for linear in (layer.up, layer.down))
    experts = None if layer.experts is None else _quantize_experts(layer.experts, bits)
    latent = layer.latent
    if latent is not None and latent.q_up is not None:
        latent = dataclasses.replace(latent, q_up=quantize_linear(latent.q_up, bits))
    return dataclasses.replace(layer, qkv=qkv, out=out, up=up, down=down, experts=experts, latent=latent)


def _quantize_experts(experts: ExpertWeights, bits: int) -> ExpertWeights:
    """Leaves the router as it is: its rounding would decide which experts are taken."""
    up, down = (tuple(quantize_linear(each, bits) for each in group) for group in (experts.up, experts.down))
    return dataclasses.replace(experts, up=up, down=down)


def tell_of_rounding(bits: Sequence[int]) -> None:
    """Says at the start what the compiled step rounds beside the weights of a quantised checkpoint.

    Args:
        bits: Sizes of the integers that it holds its matrices in.
    """
    logger.warning(
        "this checkpoint's matrices have %s bits and are multiplied by activations rounded to 8 bits, so answers differ"
        " from those of floats; --weights float computes in floats, slower and in more memory",
        " and ".join(map(str, bits)),
    )


def quantize_linear(linear: Matrix, bits: int) -> Matrix:
    """Returns the layer in ``bits``, in groups of ``GROUPS``."""
    if isinstance(linear, QuantizedLinear) and linear.bits == bits:
        return linear
    if isinstance(linear, JoinedLinear) and all(part.bits == bits for part in linear.parts):
        return linear
    weight = linear.weight if isinstance(linear, Linear) else linear.dense(torch.float32)
    if weight.shape[1] % 4:
        return linear
    with threads_for(weight.numel()):
        return _rounded(weight, bits, linear.bias)


def _rounded(weight: Tensor, bits: int, bias: Tensor | None) -> QuantizedLinear:
    inputs = weight.shape[1]
    group = math.gcd(inputs, GROUPS[bits])
    group = group if group >= SMALLEST_GROUP else inputs
    rounded = _bytes if bits == 8 else _nibbles
    parts = [rounded(rows.float().view(len(rows), -1, group)) for rows in torch.split(weight, ROWS_AT_ONCE)]
    values, scales = torch.cat([values for values, _ in parts]), torch.cat([scales for _, scales in parts])
    return QuantizedLinear(values, scales, None, bits, group, bias)


def _bytes(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Returns values and scales of 8 bits of ``[rows, groups, group]``."""
    scales = _round_scales(groups.abs().amax(-1) / LARGEST)
    return _steps(groups, scales, -LARGEST, LARGEST).to(torch.int8).flatten(1), scales


def _nibbles(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Returns values and scales of 4 bits of ``[rows, groups, group]``.

    The weight of the largest size becomes -8 steps, since there are only 7 on the other side: its sign is the scale's.
    To search for scales of the least squared error was worth 3 % of the divergence, and four times the time.
    """
    furthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    scales = _round_scales(furthest / -NIBBLE_CENTER)
    steps = _steps(groups, scales, -NIBBLE_CENTER, NIBBLE_CENTER - 1)
    return pack_nibbles((steps + NIBBLE_CENTER).flatten(1)), scales


def _round_scales(scales: Tensor) -> Tensor:
    """Rounds to what bfloat16 holds: half the memory, and the values are rounded with what is kept."""
    return scales.to(torch.bfloat16).float()


def _steps(groups: Tensor, scales: Tensor, least: int, most: int) -> Tensor:
    divisors = torch.where(scales == 0, torch.ones_like(scales), scales)
    return (groups / divisors[..., None]).round_().clamp_(least, most)
