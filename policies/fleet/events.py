"""What the scheduler over replicas hears, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from core.costs import StepCost
from core.forecast import Forecast
from core.messages.cache import KVCacheEvent, StartedRequest
from core.messages.plans import FinishedSequence, WorkerReady
from core.messages.requests import Key, OpenRequest
from core.request import Request
from policies.replica.events import ForecastsArrived, RefuseRequest, RequestsAborted, RequestsArrived


@dataclass(frozen=True, slots=True)
class ReplicaUp:
    """A replica takes requests; said again and again while it does.

    Attributes:
        cache_seq: Of the last notice of its prefix cache that was sent; 0 if there was none.
    """

    name: str
    ready: WorkerReady
    cache_seq: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaAway:
    """A replica takes no requests for now; what it runs may well go on."""

    name: str


@dataclass(frozen=True, slots=True)
class ReplicaDraining:
    """A replica is to be given up: nothing new goes there.

    Attributes:
        ends: It takes requests again, from the next ``ReplicaUp`` on, which comes every second.
    """

    name: str
    ends: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaGone:
    """A replica will not come back."""

    name: str


@dataclass(frozen=True, slots=True)
class RequestsEnded:
    """A replica is done with these."""

    finished: tuple[FinishedSequence, ...]


@dataclass(frozen=True, slots=True)
class IngressAnnounced:
    """All open streams of one ingress replica; it comes after every request that the replica has sent before."""

    ingress_id: str
    open: tuple[OpenRequest, ...]


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
class RequestsStarted:
    """These have run for the first time."""

    started: tuple[StartedRequest, ...]


@dataclass(frozen=True, slots=True)
class KVCacheChanged:
    """News of the prefix cache of a worker life, in order; or all of it, in answer to ``AskCache``."""

    replica: str
    worker_incarnation: str
    notices: tuple[KVCacheEvent, ...]


@dataclass(frozen=True, slots=True)
class StepsPriced:
    """What steps cost on a replica, as measured by now."""

    replica: str
    cost: StepCost


@dataclass(frozen=True, slots=True)
class ReplicaBroke:
    """The batch on a replica ran out of memory; nobody runs these any more (batch mode)."""

    name: str
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class ReplicaRests:
    """All of a replica's requests that the clients are not reading, if those are all it has: else none (batch mode)."""

    name: str
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class HistoryLearned:
    """What the length predictor expects of a request that it knows nothing about, as a distribution."""

    forecast: Forecast


@dataclass(frozen=True, slots=True)
class TimePassed:
    """It is ``next_due_at`` (batch mode)."""


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
    """These go to this replica, in this order."""

    replica: str
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class AbortOnReplica:
    """This replica must forget these attempts and earlier ones of the same requests."""

    replica: str
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class AskReplica:
    """Which of these attempts does this replica's Scheduler not know? It has had all that was placed there."""

    replica: str
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class AskCache:
    """What does this replica cache? Nothing has been heard yet of its worker's life, or something was lost."""

    replica: str


@dataclass(frozen=True, slots=True)
class ReportLost:
    """Nobody runs these attempts; their ingress replica is to resume them."""

    ingress_id: str
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class BatchEnded:
    """Every request of a batch has come to its end (batch mode).

    Attributes:
        number: Of the batch, within this life of the queue.
        prompt_len: Longest prompt, in tokens; what a resumed request had generated before counts as prompt.
        output_len: Longest output, in tokens; ``predicted_len`` is the forecast of that.
        duration_s: From its placement until the last end was heard of; ``estimated_s`` was expected.
    """

    replica: str
    number: int
    num_requests: int
    prompt_len: int
    output_len: int
    predicted_len: int
    estimated_s: float
    duration_s: float


GlobalInstruction = PlaceRequests | AbortOnReplica | AskReplica | AskCache | ReportLost | RefuseRequest | BatchEnded
