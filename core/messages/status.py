"""Status of components, their desired numbers, and what shows that one makes no progress or works less well."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from farsight.core.messages.kv import KVUsage
from farsight.core.messages.log import ArtefactInfo


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    """One row of ``farsight status``: a logical component, wherever it is hosted.

    Attributes:
        state: ready, starting, waiting (for a component it depends on), draining, drained
            (taken out), dead or lost (silent).
        restarts: How often the supervisor has started it again.
        http_port: Port of its process's /healthz and /metrics, on the loopback interface; 0 if there are none.
        degraded: Why it works less well than it should; empty if all is well.
        last_end: Why the Supervisor last replaced its process; empty if it never did.
        url: Address of a replica that is another server; else empty.
        breaker: State of that server's circuit breaker: ``closed``, or why requests do not go there.
        loaded: Share of its model's weights that it has read, from 0 to 1; None if it reads none, or does not tell.
        preparing: Work that delays its start and is done once on a machine; else empty.
    """

    name: str
    kind: str
    pid: int
    node: str
    state: str
    queue: int
    last_step_age_s: float | None
    restarts: int
    http_port: int
    url: str = ""
    breaker: str = ""
    last_end: str = ""
    degraded: str = ""
    loaded: float | None = None
    preparing: str = ""


@dataclass(frozen=True, slots=True)
class ComponentRows:
    """The components of one process."""

    components: tuple[ComponentStatus, ...]


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """Processor time and memory of a process.

    Attributes:
        name: Its part: a component's host, a part of Ray, the proxy.
        cpu_s: Processor seconds since it began.
        memory_bytes: Proportional memory now.
    """

    pid: int
    name: str
    cpu_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class StatusReply:
    """Every logical component, the KV of all replicas together as last reported, and what has been learned while
    serving.

    Attributes:
        queue_delay_s: Predicted queue delay of a new request, in seconds; None if it cannot be predicted.
        processes: Processes on the node of the ingress replica that answers; none where they were not asked for.
    """

    components: tuple[ComponentStatus, ...]
    kv: KVUsage
    artefacts: tuple[ArtefactInfo, ...] = ()
    queue_delay_s: float | None = None
    processes: tuple[ProcessUse, ...] = ()


@dataclass(frozen=True, slots=True)
class ComponentCounts:
    """From the Supervisor: desired numbers of the components that can be scaled; ``backends`` are other servers.

    Attributes:
        draining: Replicas that take no new requests and become ``drained`` once their requests have ended or moved.
        image_encoders: 0 where the model reads text alone.
        drained: Replicas that the operator has taken out: they count as replicas, and have no processes.
    """

    replicas: int
    length_predictors: int
    serving_time_estimators: int
    ingress_replicas: int
    backends: int = 0
    draining: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    image_encoders: int = 0


@dataclass(frozen=True, slots=True)
class SeenService:
    """From the Supervisor: the service as the Supervisor saw it last.

    Attributes:
        counts: How many components there should be.
        components: Rows of the components with a process; a row that did not answer is dead and otherwise empty.
        ingresses: The ingress replicas.
        kv, queue_delay_s: As in ``StatusReply``.
    """

    counts: ComponentCounts
    components: tuple[ComponentStatus, ...]
    ingresses: tuple[ComponentStatus, ...]
    kv: KVUsage
    queue_delay_s: float | None


@dataclass(frozen=True, slots=True)
class StartState:
    """From the Supervisor: which hosts have come up since it began, and which have not.

    Attributes:
        loaded: As in ``ComponentStatus``, of all workers together.
        preparing: As in ``ComponentStatus``, of the first worker that prepares something.
    """

    ready: tuple[str, ...]
    waiting: tuple[str, ...]
    loaded: float | None = None
    preparing: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """To the Supervisor: sets the desired number of ``kind`` to ``count``."""

    kind: str
    count: int


@dataclass(frozen=True, slots=True)
class ThreadClock:
    """A reading of a thread's progress, comparable with later readings of the same thread.

    Attributes:
        effort_s: Seconds that it has computed, or waited for a processor.
        runnable: Whether it computes, or waits for a processor or the disk, now.
    """

    effort_s: float
    runnable: bool


@dataclass(frozen=True, slots=True)
class Work:
    """The unit of work that a component is doing.

    Attributes:
        name: Name of the component.
        count: Rises with each unit of work; while it stays the same, the same unit is in progress.
        bound_s: Seconds that this unit may take.
        clock: Reading of the thread that does the work; None if it is not known.
    """

    name: str
    count: int
    bound_s: float
    clock: ThreadClock | None


@dataclass(frozen=True, slots=True)
class ProcessLife:
    """Identifies a process, so that the watcher never inspects or ends a later process with the same pid.

    Attributes:
        node_id: The node's id in Ray.
        began: Its start in clock ticks since the machine's boot; 0 where the system does not tell.
        thread_id: The system's id of the thread whose event loop answers.
    """

    node_id: str
    pid: int
    began: int
    thread_id: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """Host -> its watcher: sign of life, and the work in progress of its components; idle components are left out.

    Attributes:
        starting: Whether a component still loads what it works with.
    """

    life: ProcessLife
    work: tuple[Work, ...]
    starting: bool = False


LOG_READ = "log_read"
LOG_WRITE = "log_write"
RECORDS_WAIT = "records_wait"
RECORDS_LOST = "records_lost"
FORECASTS_SHED = "forecasts_shed"
FORECASTS_FAIL = "forecasts_fail"

SHED_SHOWN_S = 10.0
"""How long the status says that a forecast was left out, or made with less than all features."""

MAX_REASON = 300
"""Longest text of a cause; it may quote another program."""


class Degraded:
    """The causes of one component, each under a name that programs can test. Knows no clock."""

    def __init__(self) -> None:
        self._causes: dict[str, tuple[str, float]] = {}

    def note(self, cause: str, reason: str, now: float = 0.0, lasts_s: float = math.inf) -> None:
        """Records a cause, which holds from now on.

        Args:
            cause: One of the names above.
            reason: For people: what is wrong, and what follows.
            now: Seconds; needed with ``lasts_s``.
            lasts_s: Seconds after which the cause ends, for causes that show in single events; else ``clear`` ends it.
        """
        self._causes[cause] = (reason[:MAX_REASON], now + lasts_s)

    def clear(self, cause: str) -> None:
        """Ends a cause; does nothing if it was never noted."""
        if cause in self._causes:
            self._causes[cause] = ("", -math.inf)

    def reason(self, now: float) -> str:
        """Returns the reasons of all causes that hold, as one line; empty if none holds."""
        return "; ".join(reason for reason, until in self._causes.values() if now < until)

    def causes(self, now: float) -> Iterator[tuple[str, bool]]:
        """Yields every cause that was ever noted, and whether it holds."""
        return ((cause, now < until) for cause, (_, until) in self._causes.items())
