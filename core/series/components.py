"""The history of components: queues, rates, health and restarts, by component.

A pure component: its owner says what time it is, which components there should be, and which of them answered.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from farsight.core.messages.series import (
    Activity,
    ComponentsQuery,
    ComponentsReply,
    Count,
    LifeEvent,
    SeriesColumn,
    SeriesQuery,
    TableReply,
    TableRow,
)
from farsight.core.messages.status import ComponentStatus
from farsight.core.series.service import MINUTE_S, MINUTES, SECONDS, Ring

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
    """Series of many things of one kind over time, such as replicas: 15 minutes by the second, 24 hours by the minute.

    Things come and go, so rows are named when they appear; how many rows and columns there can be is fixed. Memory:
    9,360 bytes a cell, at most ``max_rows * max_columns`` cells.

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


MAX_COMPONENTS = 64
MAX_COLUMNS = 9
"""With ``MAX_COMPONENTS`` lines of each at most: 5.4 MB."""

MAX_SHOWN = 12
"""Components in one answer."""

MAX_EVENTS = 200
QUEUE, HEALTH, RESTARTS = "queue", "health", "restarts"
READY, AWAY, DOWN = 0.0, 1.0, 2.0
"""Values of ``HEALTH``: the component works; it is starting, waiting or draining; it is gone."""

LATE_S = 2.5
"""A component that has not answered for so many seconds is down; until then it is late, as on a busy machine."""

RESTARTED, LATE = "restarted", "late"
_DOWN = frozenset({"dead", "lost", "failed"})


def health_of(state: str) -> float:
    """Returns the value of ``HEALTH`` for a state."""
    return READY if state == "ready" else DOWN if state in _DOWN else AWAY


class ComponentHistory:
    """See the module. ``tick`` once a second."""

    def __init__(self) -> None:
        self._table = SeriesTable(MAX_COMPONENTS, MAX_COLUMNS, peaks=(HEALTH, RESTARTS))
        self._events: deque[LifeEvent] = deque(maxlen=MAX_EVENTS)
        self._last: dict[str, ComponentStatus] = {}
        self._heard: dict[str, float] = {}
        self._told: dict[str, str] = {}
        self._counts: dict[str, tuple[float, Mapping[str, float]]] = {}
        self._ticked_at: float | None = None

    def tick(self, seen: Iterable[Activity], now: float) -> None:
        """Ends a second.

        Args:
            seen: Every component that there should be; one that did not answer with the state ``dead``.
            now: Seconds since the epoch; an instant that is not later than the last is left out.
        """
        if self._ticked_at is not None and now <= self._ticked_at:
            return
        self._ticked_at = now
        rows, listed = {}, set()
        for each in seen:
            row, name = self._remembered(each.row, now), each.row.name
            listed.add(name)
            self._note(row, now)
            own = {HEALTH: health_of(row.state), RESTARTS: float(row.restarts)}
            if each.row.pid and own[HEALTH] < DOWN:
                own |= {QUEUE: float(row.queue)} | self._rates(name, each.counts, now)
            rows[name] = own
        for gone in set(self._last) - listed:
            del self._last[gone]
            self._counts.pop(gone, None)
            self._heard.pop(gone, None)
            self._told.pop(gone, None)
        self._table.tick(rows, now)

    def since(self, query: ComponentsQuery) -> ComponentsReply:
        """Returns the series of the kind's components, and their latest events."""
        names = sorted(name for name, row in self._last.items() if row.kind == query.kind)
        lines = self._table.since(query.span, names, MAX_SHOWN)
        return ComponentsReply(lines, tuple(each for each in self._events if each.kind == query.kind))

    def _remembered(self, row: ComponentStatus, now: float) -> ComponentStatus:
        """Adds the last process and restarts to a silent component's row; one that never answered is starting."""
        before = self._last.get(row.name)
        if row.pid:
            self._heard[row.name] = now
            return row
        if before is None or not before.pid:
            return dataclasses.replace(row, state="starting") if row.state == "dead" else row
        state = LATE if row.state == "dead" and now - self._heard[row.name] < LATE_S else row.state
        return dataclasses.replace(row, state=state, pid=before.pid, node=before.node, restarts=before.restarts)

    def _note(self, row: ComponentStatus, now: float) -> None:
        """Records an event if the component's state or process has changed."""
        before = self._last.get(row.name)
        self._last[row.name] = row
        if before is None:
            self._told[row.name] = row.state
            return
        replaced = bool(row.pid and before.pid) and (row.pid, row.node) != (before.pid, before.node)
        if replaced or row.restarts > before.restarts:
            self._events.appendleft(LifeEvent(now, row.name, row.kind, RESTARTED, row.last_end))
        if row.state not in (LATE, self._told[row.name]):
            reason = row.degraded if health_of(row.state) < DOWN else ""
            self._events.appendleft(LifeEvent(now, row.name, row.kind, row.state, reason))
            self._told[row.name] = row.state

    def _rates(self, name: str, counts: Iterable[Count], now: float) -> dict[str, float]:
        """Returns work per second since the last counts; a count that fell is of a new process, which counts from 0."""
        values = {each.name: each.value for each in counts}
        told_at, before = self._counts.get(name, (now, values))
        self._counts[name] = now, values
        span_s = max(now - told_at, 1e-3)
        gained = {key: value - before.get(key, 0.0) for key, value in values.items()}
        return {key: (values[key] if more < 0 else more) / span_s for key, more in gained.items()}
