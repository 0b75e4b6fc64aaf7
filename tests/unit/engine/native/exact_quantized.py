"""Products with weights in 8 and 4 bits, rounding by rounding, in numpy: ADR 42, written a second time."""

from __future__ import annotations

import numpy as np

from engine.checkpoint.quantized import JoinedLinear, QuantizedLinear
from tests.unit.engine.native.exact_fma import F32, FUSED, fma

CENTERS = {8: 0, 4: 8}
"""What stands for 0 where there are no minima."""


def round_rows(x: np.ndarray, group: int, most: int = 127) -> tuple[np.ndarray, np.ndarray]:
    """Floats ``[m, k]`` as integers up to ``most``, ``[m, k / group, group]``, and scales ``[m, k / group]``."""
    groups = x.reshape(len(x), -1, group)
    largest = np.abs(groups).max(-1)
    lost, nothing = ~np.isfinite(largest), largest < F32(1e-30)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factor = np.where(lost | nothing, F32(0), F32(most) / largest)
        integers = np.rint(np.where(lost[..., None], F32(0), groups * factor[..., None])).astype(np.int64)
        scales = np.where(lost, F32(np.nan), np.where(nothing, F32(0), largest / F32(most)))
    return integers, scales


def quantized_product(x: np.ndarray, weights: QuantizedLinear, *, fused: bool = FUSED) -> np.ndarray:
    """The product without the bias, float32 ``[m, n]``."""
    integers, scales = round_rows(x, weights.group)
    q = weights.integers().numpy().astype(np.int64).reshape(weights.outputs, -1, weights.group)
    if weights.minima is None:
        q = q - CENTERS[weights.bits]
    out = np.zeros((len(x), weights.outputs), F32)
    for g in range(q.shape[1]):
        exact = integers[:, g] @ q[:, g].T
        assert np.abs(exact).max(initial=0) < 2**31
        out = fma(exact.astype(F32) * scales[:, g, None], weights.scales.numpy()[None, :, g], out, fused=fused)
        if weights.minima is not None:
            shift = -(scales[:, g] * integers[:, g].sum(-1).astype(F32))
            out = fma(shift[:, None], weights.minima.numpy()[None, :, g], out, fused=fused)
    return out


def exact_product(x: np.ndarray, weights: QuantizedLinear | JoinedLinear, *, fused: bool = FUSED) -> np.ndarray:
    """``x @ w.T + bias``, of all parts."""
    parts = weights.parts if isinstance(weights, JoinedLinear) else (weights,)
    out = np.concatenate([quantized_product(x, part, fused=fused) for part in parts], -1)
    return out if weights.bias is None else out + weights.bias.float().numpy()
