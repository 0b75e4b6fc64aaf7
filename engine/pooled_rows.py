"""What a step brings of the vector of a request that generates nothing. Imports no torch, as the worker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PooledRows:
    """What one item of a step adds to the vector of a request that generates nothing.

    Attributes:
        num_rows: Hidden states in it.
        total: Their sum, float32 ``[dim]``.
    """

    num_rows: int
    total: np.ndarray

    def plus(self, other: PooledRows | None) -> PooledRows:
        """This and what earlier steps have brought."""
        if other is None:
            return self
        return PooledRows(self.num_rows + other.num_rows, self.total + other.total)

    def vector(self) -> bytes:
        """Their mean, float32 little-endian."""
        return (self.total / np.float32(self.num_rows)).astype("<f4").tobytes()
