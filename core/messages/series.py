"""What a service measured of itself over time, and what its components do, on the way to the Supervisor and to the
dashboard; no component decides by these messages."""

from __future__ import annotations

from dataclasses import dataclass

from farsight.core.messages.status import ComponentStatus


@dataclass(frozen=True, slots=True)
class TrafficCounts:
    """From an ingress replica to the Supervisor: its counts since it started, so that a lost report loses nothing.

    Attributes:
        ended: Ended requests; of these, ``failed`` ended with an error, and the clients of ``abandoned`` left before
            the end.
        rejected: Requests refused because the service was full.
        prompt_tokens: Prompt tokens of requests whose first token came.
        outside_tokens: Prompt tokens of requests that other servers answered: no Scheduler counts them.
        ttft, itl, jct: (bucket of ``core.series.tally``, durations in it).
    """

    ingress_id: str
    ended: int = 0
    failed: int = 0
    abandoned: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: tuple[tuple[int, int], ...] = ()
    itl: tuple[tuple[int, int], ...] = ()
    jct: tuple[tuple[int, int], ...] = ()
    outside_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SeriesQuery:
    """To the Supervisor.

    Attributes:
        by_minute: The last 24 h by the minute; else the last 15 min by the second.
        after: Only points later than this, in seconds since the epoch.
        span_s: Asks for the percentiles of TTFT over the last so many seconds, in whole minutes; 0 asks for none.
    """

    by_minute: bool = False
    after: float = 0.0
    span_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SeriesColumn:
    """One line of a chart; a value is None where nothing was measured."""

    name: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class SeriesReply:
    """From the Supervisor.

    Attributes:
        at: Seconds since the epoch of each point, rising.
        columns: Each with one value a point.
        tenants: GPU-seconds a second of each tenant, the most expensive ones by name and the rest together.
        ttft_s: The percentiles that ``span_s`` asks for, 50, 90 and 99, in seconds; None where no first token came.
    """

    at: tuple[float, ...]
    columns: tuple[SeriesColumn, ...]
    tenants: tuple[SeriesColumn, ...] = ()
    ttft_s: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class TableRow:
    """One thing of several of a kind, such as a replica, and its series."""

    name: str
    columns: tuple[SeriesColumn, ...]


@dataclass(frozen=True, slots=True)
class TableReply:
    """Lines of several things of a kind.

    Attributes:
        at: As in ``SeriesReply``; each column has one value a point.
        num_left_out: Things for which there was no room.
    """

    at: tuple[float, ...]
    rows: tuple[TableRow, ...]
    num_left_out: int = 0


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
class NamesQuery:
    """To a process: asks about the named components, as far as the process has them."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecentDecisions:
    """The last decisions of a component, packed as in ``core.decisions``; facts hold no text of clients."""

    component: str
    decisions: bytes


@dataclass(frozen=True, slots=True)
class RecentReply:
    """The last decisions of the components of one process."""

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
