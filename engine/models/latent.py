"""Latent attention by torch operations, its products brought into the space of the latent."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.checkpoint.families.latent import Latent
from engine.checkpoint.weights import LatentWeights
from engine.models.linear import linear

EPS = 1e-6
"""The norms of latents have it, whatever that of the model's other norms is."""


def latent_heads(latent: Latent, weights: LatentWeights, made: Tensor) -> Tensor:
    """Queries of all heads and the token's row behind them, ``[T, heads + 1, latent.width]``, not turned yet.

    Args:
        made: The product with the layer's first matrix: queries or what they are made of, then the row.
    """
    query, row = torch.split(made, [made.shape[1] - latent.width, latent.width], -1)
    if weights.q_up is not None and weights.q_norm is not None:
        query = linear(_norm(query, weights.q_norm), weights.q_up)
    query = query.view(len(query), -1, latent.query)
    turned, plain = torch.split(query, [latent.turned, latent.plain], -1)
    reached = torch.einsum("thp,hpr->thr", plain, weights.keys)
    row_turned, row_latent = torch.split(row, [latent.turned, latent.rank], -1)
    own = torch.cat([row_turned, _norm(row_latent, weights.kv_norm)], -1)
    return torch.cat([torch.cat([turned, reached], -1), own[:, None]], 1)


def latent_values(latent: Latent, weights: LatentWeights, attended: Tensor) -> Tensor:
    """Sums of values, ``[T, heads * latent.value]``, of sums of rows, ``[T, heads * latent.width]``."""
    sums = attended.view(len(attended), -1, latent.width)[..., latent.turned :]
    return torch.einsum("thr,hvr->thv", sums, weights.values).flatten(1)


def _norm(values: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(values, values.shape[-1:], None, EPS) * weight
