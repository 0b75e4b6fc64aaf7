"""The tables of the rotary embedding. Numerics follow transformers' ``ROPE_INIT_FUNCTIONS``: float32 throughout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.checkpoint.rotary_config import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RotaryConfig,
)


def rotary_tables(config: RotaryConfig, max_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines by position, each ``[max_len, rotary_dim]``; both halves of a row are the same.

    They turn the first ``rotary_dim`` values of a head, ``x``, into ``x * cos + rotate_half(x) * sin``, where
    ``rotate_half`` swaps the halves and negates what comes first.
    """
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies(config)
    scale = config.scaling.attention_factor if isinstance(config.scaling, LongScaling) else 1.0
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([sin, sin], -1).to(dtype)


def frequencies(config: RotaryConfig) -> Tensor:
    """Radians a position, float32 ``[rotary_dim / 2]``."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    scaling = config.scaling
    if isinstance(scaling, LongScaling):
        return 1.0 / (torch.tensor(scaling.short_factors, dtype=torch.float32) * config.theta**exponents)
    plain = 1.0 / (config.theta**exponents)
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    if isinstance(scaling, FactorScaling):
        return plain / torch.tensor(scaling.factors, dtype=torch.float32)
    return plain if scaling is None else _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Keeps what turns often within the pretraining's context, slows what turns rarely, interpolates between."""
    lengths = 2 * math.pi / plain
    share = (scaling.original_len / lengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    slowed = plain / scaling.factor
    between = (1 - share) * plain / scaling.factor + share * plain
    scaled = torch.where(lengths > scaling.original_len / scaling.low_freq_factor, slowed, between)
    return torch.where(lengths < scaling.original_len / scaling.high_freq_factor, plain, scaled)
