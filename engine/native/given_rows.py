"""Rows of a compiled step whose embeddings, and what turns them, are given: images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from farsight.core.errors import IntegrityError
from farsight.engine.checkpoint.rotary_config import RotaryConfig
from farsight.engine.models.rotary import rotary_tables
from farsight.engine.vision.spans import GivenRows


@dataclass(frozen=True, slots=True)
class RowAngles:
    """Cosines and sines of rows whose positions have axes.

    Attributes:
        cos, sin: By position, float32 ``[max_len, rotary_dim / 2]``.
        axes: The axis of each column.
    """

    cos: np.ndarray
    sin: np.ndarray
    axes: np.ndarray

    @classmethod
    def of(cls, rotary: RotaryConfig | None, max_len: int) -> RowAngles | None:
        """None for a model whose positions have no axes."""
        if rotary is None or rotary.axes is None:
            return None
        half = rotary.rotary_dim // 2  # both halves of a row are the same
        cos, sin = (table[:, :half].numpy() for table in rotary_tables(rotary, max_len, torch.float32))
        return cls(cos, sin, np.array(rotary.axes))

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each float32 ``[n, rotary_dim / 2]``.

        Args:
            positions: int64 ``[3, n]``.

        Raises:
            IntegrityError: The model lacks a position.
        """
        if positions.min() < 0 or positions.max() >= len(self.cos):
            raise IntegrityError(f"positions {positions.min()}..{positions.max()} of {len(self.cos)}")
        each, columns = positions[self.axes].T, np.arange(len(self.axes))
        return np.ascontiguousarray(self.cos[each, columns]), np.ascontiguousarray(self.sin[each, columns])


@dataclass(frozen=True, slots=True)
class GivenInputs:
    """Arrays of a step; they must live while it computes.

    Attributes:
        index: int32 ``[T]``: which given row each is, -1 for none.
        values: float32 ``[n, hidden]``, rounded to the model's type.
        angles: Cosines and sines, or None.
    """

    index: np.ndarray
    values: np.ndarray
    angles: tuple[np.ndarray, np.ndarray] | None

    @classmethod
    def of(cls, given: GivenRows, num_rows: int, dtype: torch.dtype, angles: RowAngles | None) -> GivenInputs:
        index = np.full(num_rows, -1, dtype=np.int32)
        index[given.rows] = np.arange(len(given.rows), dtype=np.int32)
        values = torch.from_numpy(np.array(given.values, dtype=np.float32)).to(dtype).float().numpy()
        turned = None if angles is None or given.positions is None else angles.at(given.positions)
        return cls(index, values, turned)

    @property
    def addresses(self) -> tuple[int | None, ...]:
        """Those of ``FsStep``: ``given_of``, ``given``, ``given_cos`` and ``given_sin``."""
        cos, sin = (None, None) if self.angles is None else (each.ctypes.data for each in self.angles)
        return self.index.ctypes.data, self.values.ctypes.data, cos, sin
