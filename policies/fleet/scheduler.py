"""The scheduler over replicas (``Router``): a state machine, ``handle(event, now) -> [Instruction]``.

It decides which replica runs a request and remembers it until the request ends. What a replica does with its
requests is the ``ReplicaScheduler``'s business. Nothing here has to survive: the ingress replicas announce their open
streams and the Schedulers their replicas, and from both a new Router knows what the old one knew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from core.errors import IntegrityError
from core.load_snapshot import Demand
from core.messages.cache import KVCacheEvent, StartedRequest
from core.messages.forecasts import ForecastMade
from core.messages.placement import PrefixView, ReplicaView
from core.messages.plans import FinishedSequence, WorkerReady
from core.messages.requests import Key, OpenRequest, Placed
from core.request import Request, SequenceStatus
from policies.fleet.events import (
    AbortOnReplica,
    AskCache,
    AskReplica,
    GlobalEvent,
    GlobalInstruction,
    IngressAnnounced,
    IngressLost,
    KeysUnknown,
    KVCacheChanged,
    MeanOutputLen,
    PlaceRequests,
    ReplicaAway,
    ReplicaDraining,
    ReplicaGone,
    ReplicaUp,
    ReportLost,
    RequestsEnded,
    RequestsStarted,
    StepsPriced,
)
from policies.placement.base import Choice, Placement, ReplicaLoad
from policies.replica.events import ForecastsArrived, RefuseRequest, RequestsAborted, RequestsArrived

ASK_AGAIN_S = 1.0
"""A replica that has not said what it caches is asked again after so long."""


@dataclass(slots=True)
class _Replica:
    """``ready`` is of its latest worker life; ``up`` says whether it takes requests now.

    Attributes:
        cache_seq: Of the last notice of its prefix cache; None before it has told all of it, and once one was lost.
        asked_at: When it was last asked for all of it.
    """

    load: ReplicaLoad
    ready: WorkerReady | None = None
    up: bool = False
    draining: bool = False
    cache_seq: int | None = None
    asked_at: float = -math.inf
    requests: dict[str, float] = field(default_factory=dict)  # id -> tokens of work

    @property
    def name(self) -> str:
        return self.load.name

    def enter(self, request_id: str, work_tokens: float) -> None:
        self.requests[request_id] = work_tokens
        self._weigh(work_tokens)

    def remove(self, request_id: str) -> None:
        self._weigh(-self.requests.pop(request_id))

    def _weigh(self, more_tokens: float) -> None:
        self.load.num_requests = len(self.requests)
        self.load.work_tokens += more_tokens

    def view(self) -> ReplicaView:
        capacity = 0 if self.ready is None else self.ready.num_blocks * self.ready.block_size
        taking = self.up and not self.draining
        return ReplicaView(self.name, taking, self.load.num_requests, self.load.work_tokens, capacity_tokens=capacity)

    def fits(self, request: Request) -> bool:
        if self.ready is None or (self.ready.external and request.sampling.own_engine_field):
            return False
        return request.max_total_len <= self.ready.max_model_len


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the in-flight table: an attempt and the worker life that it was placed on.

    Attributes:
        choice: Why there; None if an earlier Router placed it.
        waited_s: Until a replica took requests.
        known_len: Tokens of its prompt, and of its output in earlier attempts, when it was placed.
        expected_len: Output tokens foreseen beyond these, at most ``most_len``.
    """

    attempt: int
    ingress_id: str
    replica: str
    worker_incarnation: str
    choice: Choice | None = None
    waited_s: float = 0.0
    known_len: float = 0.0
    expected_len: float = 0.0
    most_len: float = 0.0

    @property
    def hit_len(self) -> int:
        return 0 if self.choice is None else self.choice.hit_len


class GlobalScheduler:
    """Places requests on replicas and keeps the in-flight table."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._replicas: dict[str, _Replica] = {}
        self._placed: dict[str, Entry] = {}
        self._queued: dict[str, Request] = {}  # no replica takes requests: they wait for one ...
        self._queued_since: dict[str, float] = {}  # ... since then; they are here until they are placed or gone
        self._gone: set[str] = set()  # replicas given up: what an ingress still has there is lost
        self._mean_output_len: float | None = None
        self._open: tuple[ReplicaLoad, ...] | None = None  # replicas that take requests; None if that has changed
        self._open_max_len = 0  # tokens that a sequence may reach on each of them
        self._now = 0.0  # of the event in hand

    @property
    def num_in_flight(self) -> int:
        return len(self._placed) + len(self._queued)

    def loads(self) -> tuple[ReplicaLoad, ...]:
        """Every replica that takes requests, in the order they were heard of; O(1) while they are the same."""
        if self._open is None:
            takers = [each for each in self._replicas.values() if each.up and not each.draining]
            self._open = tuple(each.load for each in takers)
            self._open_max_len = min((each.ready.max_model_len for each in takers if each.ready), default=0)
        return self._open

    def lives(self) -> list[WorkerReady]:
        """The latest worker life of every replica."""
        return [replica.ready for replica in self._replicas.values() if replica.ready is not None]

    @property
    def goes_by_prefixes(self) -> bool:
        """Whether placement looks at the blocks of a prompt."""
        return self._placement.block_size > 0

    def replica_views(self) -> tuple[ReplicaView, ...]:
        """Every replica that is known, for people to look at."""
        return tuple(self._placement.show(each.view()) for each in self._replicas.values())

    def busiest_prefixes(self, limit: int) -> tuple[PrefixView, ...]:
        """As of ``Placement``."""
        return self._placement.busiest_prefixes(limit)

    def num_on(self, replica: str) -> int:
        """Requests placed on a replica and not ended."""
        return len(self._replicas[replica].requests) if replica in self._replicas else 0

    def own_takers(self) -> list[WorkerReady]:
        """The worker lives of our own engine, not other servers, that take requests."""
        takers = [each for each in self._replicas.values() if each.up and not each.draining]
        return [each.ready for each in takers if each.ready is not None and not each.ready.external]

    def demand(self) -> Demand:
        """What is in flight, but for what other servers have; for a prediction of who would wait. O(in flight)."""
        own = {name: each for name, each in self._replicas.items() if each.ready is None or not each.ready.external}
        placed = [entry for entry in self._placed.values() if entry.replica in own]
        waiting = self._queued.values()
        return Demand(
            num_requests=len(placed) + len(waiting),
            num_waiting=len(waiting),
            num_busy=sum(bool(replica.requests) for replica in own.values()),
            known_tokens=sum(entry.known_len for entry in placed) + sum(request.known_len for request in waiting),
            cached_tokens=sum(entry.hit_len for entry in placed),
            output_tokens=sum(entry.expected_len for entry in placed) + sum(map(self._expected_len, waiting)),
        )

    def placed(self, request_id: str, attempt: int) -> Placed:
        """Where an attempt was placed; an empty replica if it waits."""
        entry = self._placed.get(request_id)
        if entry is None or entry.attempt != attempt:
            return Placed(request_id, attempt, "", "")
        return Placed(request_id, attempt, entry.replica, entry.worker_incarnation)

    def choice(self, request_id: str) -> Choice | None:
        """Why a request is where it is; None if it is nowhere or an earlier Router placed it."""
        entry = self._placed.get(request_id)
        return None if entry is None else entry.choice

    def waited_s(self, request_id: str) -> float:
        """How long a request waited for a replica that takes requests."""
        entry = self._placed.get(request_id)
        return 0.0 if entry is None else entry.waited_s

    def queued(self, response_id: str) -> list[tuple[Request, float]]:
        """The requests of an answer that wait for a replica, and since when. O(waiting)."""
        return [
            (request, self._queued_since[request_id])
            for request_id, request in self._queued.items()
            if request.origin is not None and request.origin.response_id == response_id
        ]

    def handle(self, event: GlobalEvent, now: float) -> list[GlobalInstruction]:
        """The only mutator. ``now`` is seconds on the caller's monotonic clock."""
        self._now = now
        match event:
            case RequestsArrived(requests):
                return self._arrive(requests)
            case RequestsAborted(keys):
                return self._abort(keys)
            case RequestsEnded(finished):
                self._end(finished)
            case IngressAnnounced(ingress_id, announced):
                return self._reconcile(ingress_id, announced)
            case IngressLost(ingress_id):
                return self._abort([key for key, owner in self._keys() if owner == ingress_id])
            case KeysUnknown(replica, keys):
                return self._drop_unknown(replica, keys)
            case ReplicaUp(name, ready, cache_seq):
                return self._bring_up(name, ready, cache_seq)
            case ReplicaAway(name):
                self._replica(name).up = False
                self._open = None
            case ReplicaDraining(name):
                self._replica(name).draining = True
                self._open = None
            case ReplicaGone(name):
                self._drop_replica(name)
            case MeanOutputLen(mean):
                self._mean_output_len = mean
            case ForecastsArrived(made):
                self._foresee(made)
            case RequestsStarted(started):
                self._start(started)
            case KVCacheChanged(name, worker_incarnation, notices):
                return self._take_notices(name, worker_incarnation, notices)
            case StepsPriced(name, cost):
                if name in self._replicas:
                    self._placement.priced(name, cost)
        return []

    def _replica(self, name: str) -> _Replica:
        return self._replicas.setdefault(name, _Replica(ReplicaLoad(name, 0, 0.0)))

    def _bring_up(self, name: str, ready: WorkerReady, cache_seq: int) -> list[GlobalInstruction]:
        replica = self._replica(name)
        self._gone.discard(name)
        before, replica.ready, replica.up = replica.ready, ready, True
        self._open = None
        for request_id in list(replica.requests):
            if self._placed[request_id].worker_incarnation != ready.worker_incarnation:
                self._remove(request_id)  # it went down with the worker; its ingress resumes it
        if before is None or before.worker_incarnation != ready.worker_incarnation:
            self._placement.replica_up(name, ready.num_blocks * ready.block_size)
            replica.cache_seq, replica.asked_at = None, -math.inf
        if replica.cache_seq is not None and replica.cache_seq < cache_seq:
            replica.cache_seq = None  # the last one was lost
        return [*self._ask_cache(replica), *self._serve_queued()]

    def _serve_queued(self) -> list[GlobalInstruction]:
        """A replica takes requests: those that wait for one may go."""
        waiting, self._queued = tuple(self._queued.values()), {}
        return self._place_all(waiting)

    def _drop_replica(self, name: str) -> None:
        for request_id in list(self._replica(name).requests):
            self._remove(request_id)
        del self._replicas[name]
        self._gone.add(name)
        self._open = None
        self._placement.replica_gone(name)

    def _arrive(self, requests: Iterable[Request]) -> list[GlobalInstruction]:
        fresh, superseded = [], []
        for request in requests:
            known = self._attempt_of(request.request_id)
            if known is not None and known >= request.attempt:
                continue  # a duplicate delivery
            if known is not None:
                superseded.append((request.request_id, known))
            fresh.append(request)
        aborts = self._abort(superseded)
        return aborts + self._place_all(fresh)

    def _attempt_of(self, request_id: str) -> int | None:
        if request_id in self._queued:
            return self._queued[request_id].attempt
        entry = self._placed.get(request_id)
        return None if entry is None else entry.attempt

    def _place_all(self, requests: Iterable[Request]) -> list[GlobalInstruction]:
        placed: dict[str, list[Request]] = {}
        refused: list[GlobalInstruction] = []
        for request in requests:
            loads = self.loads()
            fitting = self._fitting(request, loads)
            if fitting:
                choice = self._place(request, fitting)
                cached_len = choice.hit_len - choice.pending_len
                if cached_len:
                    request = replace(request, expected_cached_len=cached_len)
                placed.setdefault(choice.replica, []).append(request)
            elif self._never_fits(request):
                refused.append(self._refusal(request))
                self._queued_since.pop(request.request_id, None)
            else:
                self._queued[request.request_id] = request
                self._queued_since.setdefault(request.request_id, self._now)
        return [PlaceRequests(name, tuple(group)) for name, group in placed.items()] + refused

    def _never_fits(self, request: Request) -> bool:
        return bool(self.loads()) and not any(replica.fits(request) for replica in self._replicas.values())

    def _fitting(self, request: Request, loads: tuple[ReplicaLoad, ...]) -> tuple[ReplicaLoad, ...]:
        """Those that hold the request when it is as long as it may get; usually all, and then ``loads`` itself."""
        if request.max_total_len <= self._open_max_len and not request.sampling.own_engine_field:
            return loads
        return tuple(load for load in loads if self._replicas[load.name].fits(request))

    def _place(self, request: Request, loads: tuple[ReplicaLoad, ...]) -> Choice:
        choice = self._placement.choose(request, request.prefix_hashes, loads, self._now)
        ready = self._replicas[choice.replica].ready
        assert ready is not None
        waited_s = self._now - self._queued_since.pop(request.request_id, self._now)
        self._enter(request.request_id, self._entry(request, ready, choice, waited_s), self._work(request))
        return choice

    def _entry(self, request: Request, ready: WorkerReady, choice: Choice, waited_s: float) -> Entry:
        return Entry(
            attempt=request.attempt,
            ingress_id=request.ingress_id,
            replica=choice.replica,
            worker_incarnation=ready.worker_incarnation,
            choice=choice,
            waited_s=waited_s,
            known_len=request.known_len,
            expected_len=self._expected_len(request),
            most_len=request.max_total_len - request.known_len,
        )

    def _foresee(self, made: Iterable[ForecastMade]) -> None:
        """Forecasts that were made after their requests had arrived; of what is gone meanwhile they say nothing."""
        for each in made:
            if self._attempt_of(each.request_id) != each.attempt:
                continue
            request = self._queued.get(each.request_id)
            if request is not None:
                self._queued[each.request_id] = replace(request, forecast=each.forecast)
                continue
            self._placement.foreseen(each.request_id, each.forecast, self._now)
            entry = self._placed[each.request_id]
            if entry.attempt == 0:  # later ones bring theirs with them
                self._placed[each.request_id] = replace(entry, expected_len=min(entry.most_len, each.forecast.mean))

    def _start(self, started: Iterable[StartedRequest]) -> None:
        for start in started:
            entry = self._placed.get(start.request_id)
            if entry is not None and entry.attempt == start.attempt:
                self._placement.started(start.request_id, start.cached_len, start.queue_s, self._now)

    def _take_notices(
        self, name: str, worker_incarnation: str, notices: Iterable[KVCacheEvent]
    ) -> list[GlobalInstruction]:
        """Each once and in order; if one is missing, all that is cached is asked for."""
        replica = self._replicas.get(name)
        if replica is None or not self._hears_of_cache(replica, worker_incarnation):
            return []
        for notice in notices:
            last = replica.cache_seq
            if last is not None and notice.seq <= last:
                continue  # a duplicate, or an answer that news have overtaken
            if not notice.whole and (last is None or notice.seq > last + 1):
                replica.cache_seq = None
                continue
            replica.cache_seq = notice.seq
            self._placement.noticed(name, notice)
        return self._ask_cache(replica)

    def _hears_of_cache(self, replica: _Replica, worker_incarnation: str) -> bool:
        """Whether placement has a use for notices of this worker life: its blocks must be those of the placement."""
        ready = replica.ready
        if ready is None or ready.worker_incarnation != worker_incarnation:
            return False  # of a life that is over, with all that it cached
        return not ready.external and ready.block_size == self._placement.block_size

    def _ask_cache(self, replica: _Replica) -> list[GlobalInstruction]:
        ready = replica.ready
        if ready is None or replica.cache_seq is not None or self._now < replica.asked_at + ASK_AGAIN_S:
            return []
        if not self._hears_of_cache(replica, ready.worker_incarnation):
            return []
        replica.asked_at = self._now
        return [AskCache(replica.name)]

    def _refusal(self, request: Request) -> RefuseRequest:
        """Why it never fits."""
        known = [replica.ready for replica in self._replicas.values() if replica.ready is not None]
        field = request.sampling.own_engine_field
        if field and all(ready.external for ready in known):
            message = "none (nor best_of or echo with it): other servers answer here, which are not asked for it"
            return RefuseRequest(request.request_id, request.attempt, field, message)
        limit = max(ready.max_model_len for ready in known)
        message = f"prompt and max_tokens make {request.max_total_len} tokens, a worker holds at most {limit}"
        return RefuseRequest(request.request_id, request.attempt, "max_tokens", message)

    def _work(self, request: Request) -> float:
        """Known tokens plus the output still to expect: the mean, at most what was asked for."""
        most = float(request.max_total_len - request.known_len)
        expected = most if self._mean_output_len is None else min(most, self._mean_output_len)
        return request.known_len + expected

    def _expected_len(self, request: Request) -> float:
        """Output tokens still to come: by its own forecast, else by the mean, else as many as were asked for."""
        most = float(request.max_total_len - request.known_len)
        foreseen = self._mean_output_len if request.forecast is None else request.forecast.mean
        return most if foreseen is None else min(most, max(1.0, foreseen - len(request.output_ids)))

    def _abort(self, keys: Iterable[Key]) -> list[GlobalInstruction]:
        by_replica: dict[str, list[Key]] = {}
        for request_id, attempt in keys:
            known = self._attempt_of(request_id)
            entry = self._placed.get(request_id)
            if known is None or known > attempt:
                # Not ours, but somebody runs it: an attempt that an earlier Router placed, or that we have replaced.
                for name in self._replicas:
                    by_replica.setdefault(name, []).append((request_id, attempt))
                continue
            if entry is not None:
                by_replica.setdefault(entry.replica, []).append((request_id, attempt))
            self._remove(request_id)
        return [AbortOnReplica(name, tuple(group)) for name, group in by_replica.items()]

    def _end(self, finished: Iterable[FinishedSequence]) -> None:
        for end in finished:
            entry = self._placed.get(end.request_id)
            if entry is not None and entry.attempt == end.attempt:
                whole = end.status in (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH)
                self._remove(end.request_id, end.output_len if whole else None)

    def _reconcile(self, ingress_id: str, announced: tuple[OpenRequest, ...]) -> list[GlobalInstruction]:
        """Takes over what an ingress replica has open, and finds out what neither we nor a replica have."""
        lost: list[Key] = []
        asked: dict[str, list[Key]] = {}
        for stream in announced:
            key = (stream.request_id, stream.attempt)
            known = self._attempt_of(stream.request_id)
            if known is None or known < stream.attempt:
                self._remove(stream.request_id)
                if not self._adopt(ingress_id, stream):
                    lost.append(key)
                    continue
            entry = self._placed.get(stream.request_id)
            if entry is not None and entry.attempt == stream.attempt:
                asked.setdefault(entry.replica, []).append(key)
        still_open = {stream.request_id for stream in announced}
        closed = [key for key, owner in self._keys() if owner == ingress_id and key[0] not in still_open]
        asks = [AskReplica(name, tuple(keys)) for name, keys in asked.items() if self._replicas[name].up]
        reports = [ReportLost(ingress_id, tuple(lost))] if lost else []
        return [*self._abort(closed), *asks, *reports]

    def _adopt(self, ingress_id: str, stream: OpenRequest) -> bool:
        """Enters a stream that an earlier Router placed; False if it was never placed or its worker life is over."""
        if not stream.replica or stream.replica in self._gone:
            return False
        ready = self._replica(stream.replica).ready
        if ready is not None and ready.worker_incarnation != stream.worker_incarnation:
            return False
        work_tokens = float(stream.work_tokens)
        expected_len = work_tokens if self._mean_output_len is None else min(work_tokens, self._mean_output_len)
        entry = Entry(
            attempt=stream.attempt,
            ingress_id=ingress_id,
            replica=stream.replica,
            worker_incarnation=stream.worker_incarnation,
            known_len=work_tokens - expected_len,
            expected_len=expected_len,
            most_len=work_tokens,
        )
        self._enter(stream.request_id, entry, work_tokens)
        return True

    def _drop_unknown(self, replica: str, keys: Iterable[Key]) -> list[GlobalInstruction]:
        lost: dict[str, list[Key]] = {}
        for request_id, attempt in keys:
            entry = self._placed.get(request_id)
            if entry is not None and (entry.attempt, entry.replica) == (attempt, replica):
                lost.setdefault(entry.ingress_id, []).append((request_id, attempt))
                self._remove(request_id)
        return [ReportLost(ingress_id, tuple(group)) for ingress_id, group in lost.items()]

    def _keys(self) -> list[tuple[Key, str]]:
        """Every attempt in the house and its ingress replica."""
        placed = [((rid, entry.attempt), entry.ingress_id) for rid, entry in self._placed.items()]
        return placed + [((rid, request.attempt), request.ingress_id) for rid, request in self._queued.items()]

    def _enter(self, request_id: str, entry: Entry, work_tokens: float) -> None:
        self._replicas[entry.replica].enter(request_id, work_tokens)
        self._placed[request_id] = entry

    def _remove(self, request_id: str, output_len: int | None = None) -> None:
        """``output_len`` only of an output that has come to its end."""
        self._queued.pop(request_id, None)
        self._queued_since.pop(request_id, None)
        entry = self._placed.pop(request_id, None)
        if entry is not None:
            self._replicas[entry.replica].remove(request_id)
            self._placement.ended(request_id, output_len, self._now)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the table, the queue and the replicas' sums agree."""
        held = {request_id: replica.name for replica in self._replicas.values() for request_id in replica.requests}
        if held != {request_id: entry.replica for request_id, entry in self._placed.items()}:
            raise IntegrityError("the in-flight table and the replicas disagree")
        if self._queued.keys() & self._placed.keys():
            raise IntegrityError("a request is placed and waits")
        if self._queued.keys() != self._queued_since.keys():
            raise IntegrityError("of those who wait it is not known since when")
        for replica in self._replicas.values():
            load, work_tokens = replica.load, sum(replica.requests.values())
            if load.num_requests != len(replica.requests):
                raise IntegrityError(f"{load.name}: {load.num_requests} requests are counted")
            if abs(load.work_tokens - work_tokens) > 1e-6 * max(1.0, work_tokens):
                raise IntegrityError(f"{load.name}: {load.work_tokens} is not the sum of its work")
