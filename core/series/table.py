"""Series of many things of one kind over time, such as replicas: the last 15 minutes by the second, 24 h by the minute.

Things come and go, so rows are named when they appear; how many rows and columns there can be is fixed.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from core.messages.series import SeriesColumn, SeriesQuery, TableReply, TableRow

SECONDS = 900
MINUTES = 1440
MINUTE_S = 60.0

Values = Mapping[str, float]
"""By column; a column that is not in it has no value then."""


@dataclass(slots=True)
class _Sum:
    """The values of one cell within a minute."""

    total: float = 0.0
    count: int = 0
    highest: float = -math.inf

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1
        self.highest = max(self.highest, value)


@dataclass(slots=True)
class _Tier:
    """A ring of points that all rows share."""

    capacity: int
    at: array[float]
    num_added: int = 0
    columns: dict[tuple[str, str], array[float]] = field(default_factory=dict)

    def add(self, at: float, cells: Mapping[tuple[str, str], float]) -> None:
        index = self.num_added % self.capacity
        self.at[index] = at
        for cell, column in self.columns.items():
            column[index] = cells.get(cell, math.nan)
        self.num_added += 1

    def open(self, cell: tuple[str, str]) -> None:
        self.columns[cell] = array("f", [math.nan]) * self.capacity

    def after(self, at: float) -> list[int]:
        """Returns the places of the points later than ``at``, oldest first."""
        kept = min(self.num_added, self.capacity)
        places = (number % self.capacity for number in range(self.num_added - kept, self.num_added))
        return [place for place in places if self.at[place] > at]


class SeriesTable:
    """See the module. Memory: 9,360 bytes a cell, at most ``max_rows * max_columns`` cells.

    Args:
        max_rows: Rows at once. A further one takes the place of the row that has been silent longest, if that is
            silent for ``SECONDS``; else it is left out.
        max_columns: Columns of a row; further ones are left out.
        peaks: Columns of which a minute keeps the highest value, not the mean.
    """

    def __init__(self, max_rows: int, max_columns: int, peaks: Iterable[str] = ()) -> None:
        self._max_rows, self._max_columns, self._peaks = max_rows, max_columns, frozenset(peaks)
        self._seconds = _Tier(SECONDS, array("d", bytes(8 * SECONDS)))
        self._minutes = _Tier(MINUTES, array("d", bytes(8 * MINUTES)))
        self._rows: dict[str, list[str]] = {}
        self._seen: dict[str, float] = {}
        self._sums: dict[tuple[str, str], _Sum] = {}
        self._minute: float | None = None
        self._left_out: dict[str, float] = {}

    def tick(self, rows: Mapping[str, Values], now: float) -> None:
        """Adds a point. ``now``: seconds since the epoch, later than before."""
        cells: dict[tuple[str, str], float] = {}
        for name, values in rows.items():
            if self._room_for(name, now):
                self._seen[name] = now
                cells.update(self._cells(name, values))
        self._left_out = {name: at for name, at in self._left_out.items() if now - at < SECONDS}
        self._seconds.add(now, cells)
        for cell, value in cells.items():
            self._sums.setdefault(cell, _Sum()).add(value)
        minute = now // MINUTE_S
        if self._minute is not None and minute > self._minute:
            self._minutes.add(now, {cell: self._of_minute(cell, each) for cell, each in self._sums.items()})
            self._sums = {}
        self._minute = minute

    def since(self, query: SeriesQuery, names: Iterable[str], max_rows: int) -> TableReply:
        """Returns the points of the first ``max_rows`` of these rows that the query asks for. O(points * columns)."""
        tier = self._minutes if query.by_minute else self._seconds
        places = tier.after(query.after)
        known = [name for name in names if name in self._rows]
        rows = tuple(TableRow(name, self._columns(tier, name, places)) for name in known[:max_rows])
        num_left_out = len(known) - len(rows) + len(self._left_out)
        return TableReply(tuple(tier.at[place] for place in places), rows, num_left_out)

    @property
    def names(self) -> tuple[str, ...]:
        """All rows that are kept."""
        return tuple(self._rows)

    def _columns(self, tier: _Tier, name: str, places: list[int]) -> tuple[SeriesColumn, ...]:
        found = []
        for column in self._rows[name]:
            values = tier.columns[name, column]
            found.append(SeriesColumn(column, tuple(None if math.isnan(values[at]) else values[at] for at in places)))
        return tuple(found)

    def _cells(self, name: str, values: Values) -> dict[tuple[str, str], float]:
        known = self._rows[name]
        for column in values:
            if column not in known and len(known) < self._max_columns:
                known.append(column)
                for tier in (self._seconds, self._minutes):
                    tier.open((name, column))
        return {(name, column): values[column] for column in known if column in values}

    def _room_for(self, name: str, now: float) -> bool:
        if name in self._rows:
            return True
        if len(self._rows) >= self._max_rows:
            oldest = min(self._rows, key=self._seen.__getitem__)
            if now - self._seen[oldest] < SECONDS:
                self._left_out[name] = now
                return False
            self._drop(oldest)
        self._rows[name] = []
        self._left_out.pop(name, None)
        return True

    def _drop(self, name: str) -> None:
        for column in self._rows.pop(name):
            for tier in (self._seconds, self._minutes):
                del tier.columns[name, column]
            self._sums.pop((name, column), None)
        del self._seen[name]

    def _of_minute(self, cell: tuple[str, str], each: _Sum) -> float:
        return each.highest if cell[1] in self._peaks else each.total / each.count
