"""Status of components, and their desired numbers."""

from __future__ import annotations

from dataclasses import dataclass

from core.messages.kv import KVUsage
from core.messages.log import ArtefactInfo


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
