"""A linear layer by torch operations."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from engine.checkpoint.weights import Matrix


def linear(rows: Tensor, layer: Matrix) -> Tensor:
    """A layer of ``rows``, ``[T, outputs]``; quantised weights are unpacked each time: slow, and the reference."""
    return F.linear(rows, layer.dense(rows.dtype), layer.bias)
