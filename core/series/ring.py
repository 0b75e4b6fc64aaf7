"""A fixed number of points in time with a fixed set of columns; the newest replace the oldest."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

from core.errors import InvalidValueError


class Ring:
    """The last ``capacity`` points. Its memory, 4 bytes a value and 8 a point, is taken at once and never grows.

    Args:
        names: The columns.
        capacity: Points; at least 1.

    Raises:
        InvalidValueError: There is no room for a point.
    """

    def __init__(self, names: Sequence[str], capacity: int) -> None:
        if capacity < 1:
            raise InvalidValueError("capacity", capacity, "an integer >= 1")
        self.capacity = capacity
        self._at = array("d", bytes(8 * capacity))
        self._columns = {name: array("f", bytes(4 * capacity)) for name in names}
        self._num_added = 0

    def __len__(self) -> int:
        return min(self._num_added, self.capacity)

    def add(self, at: float, values: Mapping[str, float | None]) -> None:
        """Adds a point; a column that ``values`` lacks has no value there.

        Args:
            at: Seconds, later than those of the point before.
        """
        index = self._num_added % self.capacity
        self._at[index] = at
        for name, column in self._columns.items():
            value = values.get(name)
            column[index] = math.nan if value is None else value
        self._num_added += 1

    def after(self, at: float) -> tuple[list[float], dict[str, list[float | None]]]:
        """Returns the instants of the points later than ``at``, oldest first, and each column's values. O(points)."""
        indices = self._indices_after(at)
        columns = {
            name: [None if math.isnan(column[i]) else column[i] for i in indices]
            for name, column in self._columns.items()
        }
        return [self._at[i] for i in indices], columns

    def _indices_after(self, at: float) -> list[int]:
        indices: list[int] = []
        for number in range(self._num_added - 1, self._num_added - 1 - len(self), -1):
            index = number % self.capacity
            if self._at[index] <= at:
                break
            indices.append(index)
        indices.reverse()
        return indices
