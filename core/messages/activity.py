"""What components do, for the operator's pages: counts, decisions, and how their lives changed; no component decides
by these messages."""

from __future__ import annotations

from dataclasses import dataclass

from core.messages.series import SeriesQuery, TableReply
from core.messages.status import ComponentStatus


@dataclass(frozen=True, slots=True)
class Count:
    """How much of something a component has done since it began."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Activity:
    """A component now, and its counts."""

    row: ComponentStatus
    counts: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class Activities:
    """The components of one process."""

    components: tuple[Activity, ...]


@dataclass(frozen=True, slots=True)
class KindQuery:
    """To a process: the components of this kind alone."""

    kind: str


@dataclass(frozen=True, slots=True)
class RecentDecisions:
    """The last decisions of a component, packed as in ``core.decisions``; facts hold no text of clients."""

    component: str
    decisions: bytes


@dataclass(frozen=True, slots=True)
class RecentReply:
    """What the components of one process decided last."""

    components: tuple[RecentDecisions, ...]


@dataclass(frozen=True, slots=True)
class LifeEvent:
    """A component changed its state, or another process took its place.

    Attributes:
        at: Seconds since the epoch.
        state: From then on, as in ``ComponentStatus``; ``restarted`` for a new process.
        reason: Why, where that is known; else empty.
    """

    at: float
    name: str
    kind: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class ComponentsQuery:
    """To the Supervisor: the lines of the components of this kind."""

    kind: str
    span: SeriesQuery


@dataclass(frozen=True, slots=True)
class ComponentsReply:
    """From the Supervisor; ``events`` newest first."""

    lines: TableReply
    events: tuple[LifeEvent, ...]
