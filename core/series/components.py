"""The history of components: queues, rates, health and restarts, by component.

A pure component: its owner says what time it is, which components there should be, and which of them answered.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping

from core.messages.series import Activity, ComponentsQuery, ComponentsReply, Count, LifeEvent
from core.messages.status import ComponentStatus
from core.series.table import SeriesTable

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
