"""Points in time in bounded memory: the last 15 minutes by the second, the last 24 hours by the minute."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

SECONDS = 900
MINUTES = 1440
MINUTE_S = 60.0

Name = TypeVar("Name", bound=Hashable)


class Ring(Generic[Name]):
    """The last ``capacity`` points, of columns that may come and go: 4 bytes a value and 8 a point, taken at once.

    Args:
        names: The first columns.
    """

    def __init__(self, capacity: int, names: Iterable[Name] = ()) -> None:
        self.capacity = capacity
        self._at = array("d", bytes(8 * capacity))
        self._columns: dict[Name, array[float]] = {}
        self._num_added = 0
        for name in names:
            self.open(name)

    def open(self, name: Name) -> None:
        """Adds a column without values so far."""
        self._columns[name] = array("f", [math.nan]) * self.capacity

    def drop(self, name: Name) -> None:
        """Removes a column."""
        del self._columns[name]

    def add(self, at: float, values: Mapping[Name, float | None]) -> None:
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

    def after(self, at: float) -> list[int]:
        """Returns the places of the points later than ``at``, oldest first."""
        oldest = max(0, self._num_added - self.capacity)
        places = (number % self.capacity for number in range(oldest, self._num_added))
        return [place for place in places if self._at[place] > at]

    def instants(self, places: Iterable[int]) -> tuple[float, ...]:
        """Returns the instants of points, in seconds."""
        return tuple(self._at[place] for place in places)

    def values(self, name: Name, places: Iterable[int]) -> tuple[float | None, ...]:
        """Returns the values of a column; None where a point has none."""
        column = self._columns[name]
        return tuple(None if math.isnan(column[place]) else column[place] for place in places)
