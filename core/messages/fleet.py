"""What Schedulers and the Supervisor tell the Router about replicas."""

from __future__ import annotations

from dataclasses import dataclass

from farsight.core.messages.plans import FinishedSequence, KVCacheEvent, StartedRequest, WorkerReady
from farsight.core.messages.requests import Key, Refusal
from farsight.core.messages.step_times import ReplicaStepProfile


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """Scheduler -> Router, every second and at once when it changes.

    Attributes:
        ready: None while the worker is away.
        refusals: Requests that turned out, since they were placed, not to fit the worker.
        broken: Requests of a batch that ran out of memory which had not ended; no worker runs them any more.
        resting: All requests of the replica, if every client of it has stopped reading; else none.
        cache_seq: Number of the last KV cache event that was sent to the Router; 0 if there was none.
        sums: Sums of all requests that are here, as ``KeySums`` packs them; the Router asks about those that differ.
    """

    replica: str
    ready: WorkerReady | None
    refusals: tuple[Refusal, ...]
    broken: tuple[Key, ...] = ()
    resting: tuple[Key, ...] = ()
    cache_seq: int = 0
    sums: bytes = b""


@dataclass(frozen=True, slots=True)
class ReplicaName:
    """Supervisor -> Router: drain this replica, end its drain, or forget it."""

    replica: str


@dataclass(frozen=True, slots=True)
class InFlight:
    """Router -> Supervisor: requests still on a draining replica."""

    count: int


@dataclass(frozen=True, slots=True)
class ReplicaNews:
    """Scheduler -> Router, several times a second: which requests started and ended there, and prefix cache changes.

    Attributes:
        finished: Sequences that reached their end; the blocks that they left in the cache are in this message, or were
            in an earlier one.
        cache: The worker's KV cache events, in order; none where placement does not look at prefixes.
        profile: The cost of steps there, if there is a new measurement.
    """

    replica: str
    worker_incarnation: str
    started: tuple[StartedRequest, ...] = ()
    finished: tuple[FinishedSequence, ...] = ()
    cache: tuple[KVCacheEvent, ...] = ()
    profile: ReplicaStepProfile | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Router -> ingress: limits of a request.

    Attributes:
        ready: Capacity of the replica with the lowest limit of sequence length.
        prefix_block_size: Tokens of a block of ``Request.prefix_hashes``; 0 where placement does not look at prefixes.
    """

    ready: WorkerReady
    prefix_block_size: int = 0
