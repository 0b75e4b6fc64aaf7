"""The compiled step's mixture of experts, rounding by rounding, in numpy (ADR 68)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.checkpoint.families.experts import Experts
from engine.checkpoint.weights import ExpertWeights, Matrix
from tests.unit.engine.native.exact_fma import F32, WIDTH

Exp = Callable[[np.ndarray], np.ndarray]


def exact_mixture(
    experts: Experts,
    weights: ExpertWeights,
    normed: np.ndarray,
    shared: np.ndarray | None,
    linear: Callable[[np.ndarray, Matrix], np.ndarray],
    mlp: Callable[[np.ndarray, Matrix, Matrix], np.ndarray],
    exp: Exp,
) -> np.ndarray:
    """What the experts add to the residual stream, ``[T, hidden]``."""
    logits = linear(normed, weights.router)
    mixed = np.zeros_like(normed)
    for row, scores in enumerate(logits[:, : experts.count]):
        chosen, factors = _route(experts, scores, exp)
        for expert, factor in zip(chosen, factors, strict=True):
            part = mlp(normed[row : row + 1], weights.up[expert], weights.down[expert])[0]
            mixed[row] = mixed[row] + factor * part
    if shared is None:
        return mixed
    gate = F32(1) / (F32(1) + exp(-logits[:, experts.count :])) if experts.shared_gate else F32(1)
    return mixed + gate * shared


def _route(experts: Experts, scores: np.ndarray, exp: Exp) -> tuple[list[int], list[F32]]:
    order = sorted(range(experts.count), key=lambda i: (-scores[i], i))[: experts.active]
    each = exp(scores - scores.max())
    if experts.normalized:
        total = F32(0)
        for i in order:
            total = total + each[i]
    else:
        padded = np.pad(each, (0, -len(each) % WIDTH)).reshape(-1, WIDTH)
        lanes = np.zeros(WIDTH, F32)
        for vector in padded:
            lanes = lanes + vector
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        total = lanes[0]
    return order, [each[i] / total * F32(experts.scale) for i in order]
