"""Images of a sequence, and what they put into a step: rows in place of embeddings, and positions. Knows no torch.

A chunk may begin and end within an image, so everything is asked for by ranges of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from farsight.core.errors import InvalidValueError
from farsight.core.images import ImageSpan
from farsight.core.request import Request

FindRows = Callable[[ImageSpan, int], np.ndarray]
"""Finds the rows of an image: (span, hidden size) -> float32 ``[span.length, hidden_size]``, read-only for everyone.
Raises InvalidValueError if they are not there, or not of that size."""


def carried_rows(span: ImageSpan, hidden_size: int) -> np.ndarray:
    """Returns the rows that came with the request (``FindRows``)."""
    return unpacked(span.embeddings, span.length, hidden_size)


def unpacked(data: bytes | memoryview, length: int, hidden_size: int) -> np.ndarray:
    """Unpacks ``ImageSpan.embeddings`` to float32 ``[length, hidden_size]``.

    Raises:
        InvalidValueError: There are more or fewer of them.
    """
    values, size = length * hidden_size, len(data)
    if size == 4 * values:
        return np.frombuffer(data, "<f4").reshape(length, hidden_size)
    if size == 2 * values:
        wide = np.frombuffer(data, "<u2").astype("<u4") << np.uint32(16)
        return wide.view("<f4").reshape(length, hidden_size)
    expected = f"{4 * values} bytes (float32) or {2 * values} (bfloat16): {length} rows of {hidden_size}"
    raise InvalidValueError("images.embeddings", f"{size} bytes", expected)


@dataclass(frozen=True, slots=True)
class GivenRows:
    """What images put into a step of ``T`` rows.

    Attributes:
        rows: int64 ``[n]``, ascending: the rows of the step whose embeddings are given.
        values: float32 ``[n, hidden]``.
        positions: int64 ``[3, n]``: time, row and column; None where positions have no axes.
    """

    rows: np.ndarray
    values: np.ndarray
    positions: np.ndarray | None


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """What a worker's model makes of images.

    Attributes:
        find_rows: Finds their rows.
        hidden_size: Values of a row.
        sees: Whether the model takes images at all.
        axes: Whether its positions have axes.
    """

    find_rows: FindRows
    hidden_size: int
    sees: bool
    axes: bool

    def of(self, request: Request) -> SequenceImages:
        """Returns the images of a request that has some.

        Raises:
            InvalidValueError: Their rows are not there or have another size, or the model takes no images.
        """
        if not self.sees:
            raise InvalidValueError("images", len(request.images), "none: the model reads text alone")
        values = [self.find_rows(span, self.hidden_size) for span in request.images]
        return SequenceImages(request.images, values, axes=self.axes)


class SequenceImages:
    """The images of one sequence.

    Args:
        spans: In their order.
        values: The rows of each, float32 ``[length, hidden]``.
        axes: Whether positions have axes.

    Raises:
        InvalidValueError: An image without a grid where positions have axes.
    """

    def __init__(self, spans: Sequence[ImageSpan], values: Sequence[np.ndarray], *, axes: bool) -> None:
        self.spans = tuple(spans)
        self._values = tuple(values)
        self._axes = axes
        self._ends = np.array([span.end for span in self.spans], dtype=np.int64)
        shifts = [self._shift(index, span) for index, span in enumerate(self.spans)]
        self._behind = np.concatenate([[0], np.cumsum(shifts, dtype=np.int64)])

    def _shift(self, index: int, span: ImageSpan) -> int:
        """Returns by how much an image's tokens are more than the positions that it takes."""
        if not self._axes:
            return 0
        if not span.grid:
            raise InvalidValueError(f"images[{index}].grid", span.grid, "rows and columns: positions have axes")
        return span.length - max(span.grid)

    @property
    def end(self) -> int:
        """Index behind the last token of the last image."""
        return self.spans[-1].end

    def position(self, index: int) -> int:
        """Returns the position of a token outside of images, the same on all axes."""
        return index - int(self._behind[np.searchsorted(self._ends, index, side="right")])

    def positions(self, start: int, end: int) -> np.ndarray:
        """Returns ``position`` of each token, int64 ``[end - start]``; of an image's, any that the sequence has."""
        found: np.ndarray = np.arange(start, end)
        found -= self._behind[np.searchsorted(self._ends, found, side="right")]
        return found

    def given(self, start: int, end: int, first_row: int) -> GivenRows | None:
        """Returns the part of images among these tokens, rows of the step from ``first_row`` on; None without."""
        rows, values, positions = [], [], []
        for span, held in zip(self.spans, self._values, strict=True):
            low, high = max(start, span.start), min(end, span.end)
            if low >= high:
                continue
            rows.append(np.arange(low, high) + (first_row - start))
            values.append(held[low - span.start : high - span.start])
            if self._axes:
                positions.append(self._on_axes(span, low, high))
        if not rows:
            return None
        on_axes = np.concatenate(positions, axis=1) if self._axes else None
        return GivenRows(np.concatenate(rows), np.concatenate(values), on_axes)

    def _on_axes(self, span: ImageSpan, low: int, high: int) -> np.ndarray:
        """Returns time, row and column of tokens of one image, int64 ``[3, high - low]``."""
        places = np.arange(low - span.start, high - span.start)
        columns = span.grid[1]
        return np.stack([np.zeros_like(places), places // columns, places % columns]) + self.position(span.start)


def joined(parts: Sequence[GivenRows]) -> GivenRows | None:
    """Joins them one after the other; None of none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    on_axes = [part.positions for part in parts if part.positions is not None]
    return GivenRows(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.values for part in parts]),
        np.concatenate(on_axes, axis=1) if on_axes else None,
    )
