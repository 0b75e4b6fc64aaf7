"""A mixture of experts by torch operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.checkpoint.families.experts import Experts
from engine.checkpoint.weights import ExpertWeights, Matrix
from engine.models.linear import linear

_LEAST = 1e-20
"""Added to sums that are divided by: a sigmoid may be 0."""


def route(experts: Experts, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and their weights in float32: each ``[T, active]``.

    Args:
        logits: The router's, float32 ``[T, experts]``.
        correction: As of ``ExpertWeights``.
    """
    scores = logits.softmax(-1) if experts.scores == "softmax" else logits.sigmoid()
    wanted = scores if correction is None else scores + correction
    if experts.groups > 1:
        wanted = _of_best_groups(experts, wanted)
    chosen = wanted.topk(experts.active, -1).indices
    weights = scores.gather(-1, chosen)
    if experts.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST)
    return chosen, weights * experts.scale


def _of_best_groups(experts: Experts, scores: Tensor) -> Tensor:
    """The scores of a token's best groups; -inf for those of the others."""
    groups = scores.view(len(scores), experts.groups, -1)
    sums = groups.topk(experts.group_best, -1).values.sum(-1)
    taken = sums.topk(experts.active_groups, -1).indices
    others = torch.ones_like(sums, dtype=torch.bool).scatter_(-1, taken, value=False)
    return groups.masked_fill(others[..., None], float("-inf")).flatten(-2)


def mix(
    experts: Experts,
    weights: ExpertWeights,
    normed: Tensor,
    shared: Tensor | None,
    mlp: Callable[[Matrix, Matrix, Tensor], Tensor],
) -> Tensor:
    """What the experts that are here add to the residual stream, ``[T, hidden]``.

    Args:
        normed: Input of the router and of the experts, ``[T, hidden]``.
        shared: What the experts that every token takes make of it; None without.
        mlp: Computes one expert.
    """
    logits = linear(normed, weights.router).float()
    chosen, factors = route(experts, logits[:, : experts.count], weights.correction)
    mixed = torch.zeros_like(normed)
    for expert in sorted(set(chosen.flatten().tolist()).intersection(weights.here)):
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        here = expert - weights.first
        part = mlp(weights.up[here], weights.down[here], normed[rows])
        mixed.index_add_(0, rows, part * factors[rows, place, None].to(part.dtype))
    if shared is None:
        return mixed
    if experts.shared_gate:
        shared = shared * logits[:, experts.count :].sigmoid().to(shared.dtype)
    return mixed + shared
