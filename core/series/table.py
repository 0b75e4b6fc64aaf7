"""Series of many things of one kind over time, such as replicas: the last 15 minutes by the second, 24 h by the minute.

Things come and go, so rows are named when they appear; how many rows and columns there can be is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from core.messages.series import SeriesColumn, SeriesQuery, TableReply, TableRow
from core.series.ring import MINUTE_S, MINUTES, SECONDS, Ring

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
        self._seconds, self._minutes = Ring[tuple[str, str]](SECONDS), Ring[tuple[str, str]](MINUTES)
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
        rows = []
        for name in known[:max_rows]:
            columns = (SeriesColumn(column, tier.values((name, column), places)) for column in self._rows[name])
            rows.append(TableRow(name, tuple(columns)))
        num_left_out = len(known) - len(rows) + len(self._left_out)
        return TableReply(tier.instants(places), tuple(rows), num_left_out)

    @property
    def names(self) -> tuple[str, ...]:
        """All rows that are kept."""
        return tuple(self._rows)

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
                tier.drop((name, column))
            self._sums.pop((name, column), None)
        del self._seen[name]

    def _of_minute(self, cell: tuple[str, str], each: _Sum) -> float:
        return each.highest if cell[1] in self._peaks else each.total / each.count
