"""The tables of the rotary embedding. Numerics follow transformers' ``ROPE_INIT_FUNCTIONS``: float32 throughout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from farsight.engine.checkpoint.rotary_config import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    RotaryConfig,
    YarnScaling,
)


def rotary_tables(config: RotaryConfig, max_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines by position, each ``[max_len, rotary_dim]``; both halves of a row are the same.

    Where the factors are chosen by request, those of the long ones follow behind ``max_len`` rows of the short ones.

    They turn the first ``rotary_dim`` values of a head, ``x``, into ``x * cos + rotate_half(x) * sin``, where
    ``rotate_half`` swaps the halves and negates what comes first.
    """
    scaling = config.scaling
    lengths = [max_len]
    if isinstance(scaling, LongScaling) and config.long_row(max_len):
        lengths.insert(0, scaling.original_len)
    positions = torch.arange(max_len, dtype=torch.float32)[:, None]
    angles = torch.cat([positions * frequencies(config, length) for length in lengths])
    scale = scaling.attention_factor if isinstance(scaling, (LongScaling, YarnScaling)) else 1.0
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([sin, sin], -1).to(dtype)


def frequencies(config: RotaryConfig, max_len: int) -> Tensor:
    """Returns radians a position, float32 ``[rotary_dim / 2]``.

    Args:
        max_len: Longest sequence that is served, in tokens.
    """
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    scaling = config.scaling
    if isinstance(scaling, LongScaling):
        factors = scaling.long_factors if max_len > scaling.original_len else scaling.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * config.theta**exponents)
    if isinstance(scaling, DynamicScaling):
        return 1.0 / (_stretched_base(config, scaling, max_len) ** exponents)
    plain = 1.0 / (config.theta**exponents)
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    if isinstance(scaling, ProportionalScaling):
        turned = torch.arange(len(plain)) < scaling.turned
        return torch.where(turned, plain / scaling.factor, 0.0)
    if isinstance(scaling, FactorScaling):
        return plain / torch.tensor(scaling.factors, dtype=torch.float32)
    if isinstance(scaling, YarnScaling):
        return _yarn(config.theta**exponents, config, scaling)
    return plain if scaling is None else _llama3(plain, scaling)


def _stretched_base(config: RotaryConfig, scaling: DynamicScaling, max_len: int) -> float:
    length, dim = max(max_len, scaling.original_len), config.rotary_dim
    stretch = scaling.factor * length / scaling.original_len - (scaling.factor - 1)
    return float(config.theta * stretch ** (dim / (dim - 2)))


def _yarn(lengths: Tensor, config: RotaryConfig, scaling: YarnScaling) -> Tensor:
    """Mixes the plain frequencies and the slowed ones, by a ramp over their numbers.

    Args:
        lengths: Positions a radian, of the plain frequencies.
    """
    dim = config.rotary_dim

    def number(turns: float) -> float:
        """Returns the number of the frequency that turns so often within the original context."""
        return dim * math.log(scaling.original_len / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = number(scaling.beta_fast), number(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * lengths) * (1 - kept) + 1.0 / lengths * kept


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
