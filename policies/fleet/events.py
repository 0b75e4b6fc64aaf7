"""Events and instructions of the scheduler over replicas."""

from __future__ import annotations

from dataclasses import dataclass

from farsight.core.costs import StepCost
from farsight.core.forecast import Forecast
from farsight.core.messages.plans import FinishedSequence, KVCacheEvent, StartedRequest, WorkerReady
from farsight.core.messages.requests import Key, OpenRequest
from farsight.core.request import Request
from farsight.policies.replica.events import ForecastsArrived, RefuseRequest, RequestsAborted, RequestsArrived


@dataclass(frozen=True, slots=True)
class ReplicaUp:
    """A replica takes requests; repeated as long as this is so.

    Attributes:
        cache_seq: Number of the last notice of its prefix cache that was sent; 0 if there was none.
        sums: The sums of the requests there, as ``KeySums`` packs them; None if they are not to be compared.
    """

    name: str
    ready: WorkerReady
    cache_seq: int = 0
    sums: bytes | None = None


@dataclass(frozen=True, slots=True)
class ReplicaAway:
    """A replica takes no requests for now; requests on it may go on."""

    name: str


@dataclass(frozen=True, slots=True)
class ReplicaDraining:
    """A replica is to be given up: no new request is placed on it.

    Attributes:
        ends: Draining ends: the replica takes requests again, from the next ``ReplicaUp`` on, which comes every second.
    """

    name: str
    ends: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaGone:
    """A replica will not come back."""

    name: str


@dataclass(frozen=True, slots=True)
class RequestsEnded:
    """These requests have ended on their replica."""

    finished: tuple[FinishedSequence, ...]


@dataclass(frozen=True, slots=True)
class IngressAnnounced:
    """The open streams of one ingress replica: the sums of all, and those of the parts that ``AskIngress`` named.

    It comes after every request that the replica has sent before.
    """

    ingress_id: str
    sums: bytes
    listed: tuple[int, ...] = ()
    open: tuple[OpenRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class IngressLost:
    """An ingress replica is gone, and its clients with it."""

    ingress_id: str


@dataclass(frozen=True, slots=True)
class KeysUnknown:
    """A replica's Scheduler, asked by ``AskReplica``, does not know these attempts."""

    replica: str
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class RequestsReturned:
    """A replica has given back these requests, which have never run there; they may be placed again, as they are."""

    replica: str
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class RequestsStarted:
    """These requests have run for the first time."""

    started: tuple[StartedRequest, ...]


@dataclass(frozen=True, slots=True)
class KVCacheChanged:
    """Changes of the prefix cache of a worker life, in order; or its whole content, in answer to ``AskCache``."""

    replica: str
    worker_incarnation: str
    notices: tuple[KVCacheEvent, ...]


@dataclass(frozen=True, slots=True)
class StepsPriced:
    """The cost of steps on a replica, as measured by now."""

    replica: str
    cost: StepCost


@dataclass(frozen=True, slots=True)
class ReplicaBroke:
    """The batch on a replica ran out of memory; these attempts run nowhere any more (batch mode)."""

    name: str
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class ReplicaRests:
    """All requests of a replica if none of their clients is reading; otherwise no requests (batch mode)."""

    name: str
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class HistoryLearned:
    """The output length that the predictor expects of a request that it knows nothing about, as a distribution."""

    forecast: Forecast


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The instant ``next_due_at`` has come (batch mode); otherwise: it is time to look at what waits on replicas."""


GlobalEvent = (
    ReplicaUp
    | ReplicaAway
    | ReplicaDraining
    | ReplicaGone
    | RequestsArrived
    | RequestsAborted
    | RequestsEnded
    | IngressAnnounced
    | IngressLost
    | KeysUnknown
    | RequestsReturned
    | RequestsStarted
    | KVCacheChanged
    | StepsPriced
    | ForecastsArrived
    | ReplicaBroke
    | ReplicaRests
    | HistoryLearned
    | TimePassed
)


@dataclass(frozen=True, slots=True)
class PlaceRequests:
    """These requests go to this replica, in this order."""

    replica: str
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class AbortOnReplica:
    """This replica must forget these attempts and earlier ones of the same requests."""

    replica: str
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class AskReplica:
    """Asks the replica's Scheduler which of these attempts it does not know; all that was placed there reached it."""

    replica: str
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class RecallRequests:
    """Asks the replica's Scheduler to give back those of these attempts that no plan has named yet."""

    replica: str
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class AskCache:
    """Asks the replica for all that it caches: its worker's life has told nothing yet, or a notice was lost."""

    replica: str


@dataclass(frozen=True, slots=True)
class AskIngress:
    """Asks the ingress replica for its open streams in these parts of ``KeySums``: other ones are known here."""

    ingress_id: str
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReportLost:
    """These attempts run nowhere; their ingress replica is to resume them."""

    ingress_id: str
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class BatchEnded:
    """Every request of a batch has come to its end (batch mode).

    Attributes:
        number: Number of the batch within this life of the queue.
        prompt_len: Longest prompt, in tokens; tokens that a resumed request had generated before count as prompt.
        output_len: Longest output, in tokens; ``predicted_len`` is its forecast.
        duration_s: Seconds from the batch's placement until its last end was reported; ``estimated_s`` was expected.
    """

    replica: str
    number: int
    num_requests: int
    prompt_len: int
    output_len: int
    predicted_len: int
    estimated_s: float
    duration_s: float


GlobalInstruction = (
    PlaceRequests
    | AbortOnReplica
    | AskReplica
    | RecallRequests
    | AskCache
    | AskIngress
    | ReportLost
    | RefuseRequest
    | BatchEnded
)
