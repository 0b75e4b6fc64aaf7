"""What Schedulers and the Supervisor tell the Router about replicas."""

from __future__ import annotations

from dataclasses import dataclass

from core.messages.cache import KVCacheEvent, StartedRequest
from core.messages.plans import FinishedSequence, WorkerReady
from core.messages.requests import Key, Refusal
from core.messages.step_times import ReplicaStepProfile


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """Scheduler -> Router, every second and at once when it changes.

    Attributes:
        ready: None while the worker is away.
        refusals: Requests that turned out, since they were placed, not to fit the worker.
        broken: Of a batch that ran out of memory, all that had not ended: nobody runs them any more.
        resting: All that the replica holds, if every client of it has stopped reading: else nothing.
        cache_seq: Of the last notice of its prefix cache that the Router has been sent; 0 if there was none.
    """

    replica: str
    ready: WorkerReady | None
    refusals: tuple[Refusal, ...]
    broken: tuple[Key, ...] = ()
    resting: tuple[Key, ...] = ()
    cache_seq: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaName:
    """Supervisor -> Router: drain this replica, or forget it."""

    replica: str


@dataclass(frozen=True, slots=True)
class InFlight:
    """Router -> Supervisor: requests still on a draining replica."""

    count: int


@dataclass(frozen=True, slots=True)
class ReplicaNews:
    """Scheduler -> Router, several times a second: what has become of requests there, and of the prefix cache.

    Attributes:
        finished: Sequences that reached their end; what they left in the cache is in this message, or was in an
            earlier one.
        cache: The worker's notices, in order; none where placement does not look at prefixes.
        profile: What steps cost there, if that has been measured anew.
    """

    replica: str
    worker_incarnation: str
    started: tuple[StartedRequest, ...] = ()
    finished: tuple[FinishedSequence, ...] = ()
    cache: tuple[KVCacheEvent, ...] = ()
    profile: ReplicaStepProfile | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Router -> ingress: what a request may be.

    Attributes:
        ready: Of the replica that holds the shortest sequences.
        prefix_block_size: Tokens of a block of ``Request.prefix_hashes``; 0 where nobody looks at prefixes.
    """

    ready: WorkerReady
    prefix_block_size: int = 0
