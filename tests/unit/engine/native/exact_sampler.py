"""The compiled sampler, rounding by rounding, in numpy: what ADR 94 promises, written a second time.

Weights are float32, sums of them float64 in one order. The tokens that top-p keeps are found by a sort here.
"""

from __future__ import annotations

import numpy as np

from tests.unit.engine.native.exact_step import F32, fma

LANES, BLOCK = 16, 512


def weights_of(x: np.ndarray, top: np.float32, temperature: float) -> np.ndarray:
    """``2^((x - top) * log2(e) / temperature)``, by the polynomial of ``sampler.cpp``."""
    exponents = (x - top) * F32(1.4426950408889634 / temperature)
    bounded = np.maximum(exponents, F32(-126))
    whole = (bounded + F32(12582912)) - F32(12582912)
    rest = bounded - whole
    result = np.full_like(rest, 1.535336188319500e-4)
    for coefficient in (
        *(1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2),
        *(2.402264791363012e-1, 6.931472028550421e-1, 1.0),
    ):
        result = fma(result, rest, np.full_like(rest, coefficient))
    scaled_up = (result.view(np.int32) + (whole.astype(np.int32) << 23)).view(F32)
    return np.where(exponents < -126, F32(0), scaled_up)


def block_sums(weights: np.ndarray) -> list[float]:
    """The sums of blocks of tokens: lane by lane, then the upper half of the lanes to the lower half, down to one."""
    sums = []
    for first in range(0, len(weights), BLOCK):
        block = weights[first : first + BLOCK].astype(np.float64)
        lanes = np.zeros(LANES)
        for row in np.pad(block, (0, -len(block) % LANES)).reshape(-1, LANES):
            lanes = lanes + row
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        sums.append(float(lanes[0]))
    return sums


def draw(x: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """The token of a row of finite logits."""
    top = x.max()
    ids = np.arange(len(x))
    if 0 < top_k < len(x):
        ids = ids[x >= np.sort(x)[-top_k]]
    if top_p < 1:
        weights = weights_of(x[ids], top, temperature)
        total = sum(block_sums(weights))
        order = np.argsort(x[ids], kind="stable")[::-1]  # of equal logits the highest id first
        ahead = np.concatenate([[0.0], np.cumsum(weights[order].astype(np.float64))[:-1]])
        is_kept = total - ahead > (1 - top_p) * total
        is_kept[0] = True
        ids = np.sort(ids[order[is_kept]])
    if min_p > 0:
        ids = ids[weights_of(x[ids], top, temperature) >= F32(min_p)]
    weights = weights_of(x[ids], top, temperature)
    sums = block_sums(weights)
    target = uniform * sum(sums)
    before, block = 0.0, 0
    while block < len(sums) - 1 and before + sums[block] <= target:
        before += sums[block]
        block += 1
    for place in range(block * BLOCK, len(weights)):
        before += float(weights[place])
        if before > target:
            return int(ids[place])
    return int(ids[np.flatnonzero(weights)[-1]])
