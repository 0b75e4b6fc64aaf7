"""What of the contracts depends on the processor: how wide a vector is, and a multiply-add that rounds once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

F32 = np.float32
_FLAGS = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())

FUSED = "avx512f" in _FLAGS or {"avx2", "fma"} <= _FLAGS
"""Whether the processor rounds a multiply-add once; if not, the compiled step rounds the product as well."""

WIDTH = 16 if "avx512f" in _FLAGS else 8 if "avx2" in _FLAGS else 4
"""Lanes of a vector, ``kWidth`` in ``lanes.h``."""


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, *, fused: bool = FUSED) -> np.ndarray:
    """``a * b + c`` rounded once: float64 holds the product, and a sum rounded to odd can be rounded again."""
    if not fused:
        return np.asarray(a * b + c)
    product, addend = np.float64(a) * np.float64(b), np.float64(c)
    total = np.asarray(product + addend)
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = np.asarray(total).view(np.int64) & 1 == 0
    odd = np.where((error != 0) & even, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return odd.astype(F32)
