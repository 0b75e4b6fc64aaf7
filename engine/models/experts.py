"""A mixture of experts by torch operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.checkpoint.families.experts import Experts
from engine.checkpoint.weights import ExpertWeights, Matrix
from engine.models.linear import linear


def route(experts: Experts, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and their weights in float32: each ``[T, active]``.

    Args:
        logits: The router's, float32 ``[T, experts]``.
    """
    scores = logits.softmax(-1)
    weights, chosen = scores.topk(experts.active, -1)
    if experts.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights * experts.scale


def mix(
    experts: Experts,
    weights: ExpertWeights,
    normed: Tensor,
    shared: Tensor | None,
    mlp: Callable[[Matrix, Matrix, Tensor], Tensor],
) -> Tensor:
    """What the experts add to the residual stream, ``[T, hidden]``.

    Args:
        normed: Input of the router and of the experts, ``[T, hidden]``.
        shared: What the experts that every token takes make of it; None without.
        mlp: Computes one expert.
    """
    logits = linear(normed, weights.router).float()
    chosen, factors = route(experts, logits[:, : experts.count])
    mixed = torch.zeros_like(normed)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        part = mlp(weights.up[expert], weights.down[expert], normed[rows])
        mixed.index_add_(0, rows, part * factors[rows, place, None].to(part.dtype))
    if shared is None:
        return mixed
    if experts.shared_gate:
        shared = shared * logits[:, experts.count :].sigmoid().to(shared.dtype)
    return mixed + shared
