"""A fleet of replicas behind the scheduler over replicas, in either mode."""

from __future__ import annotations

import contextlib
import gc
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, TypeVar

from farsight.core.errors import InvalidValueError
from farsight.core.messages.plans import FinishedSequence, StartedRequest
from farsight.core.messages.requests import Key
from farsight.core.request import Request
from farsight.policies.fleet.batch_scheduler import BatchScheduler
from farsight.policies.fleet.events import (
    BatchEnded,
    GlobalEvent,
    PlaceRequests,
    RecallRequests,
    ReplicaBroke,
    ReplicaDraining,
    ReplicaGone,
    ReplicaUp,
    RequestsEnded,
    RequestsReturned,
    RequestsStarted,
    TimePassed,
)
from farsight.policies.fleet.scaling import LOOK_S, ReplicaScaler
from farsight.policies.fleet.scheduler import FleetMachine
from farsight.policies.fleet.sessions import SessionTable
from farsight.policies.moves.recall import LOOK_S as LOOK_AT_WAITING_S
from farsight.policies.order.offload_orders import OffloadDecider
from farsight.policies.replica.events import RefuseRequest, RequestsArrived
from farsight.policies.replica.scheduler import ReplicaScheduler
from farsight.simulator.cluster.encoder import SimulatedEncoder
from farsight.simulator.cluster.latency import LatencyModel
from farsight.simulator.cluster.records import Record, Recorder, Timeline
from farsight.simulator.cluster.replica import Replica, ReplicaShape
from farsight.simulator.cluster.tiered import TieredReplica
from farsight.simulator.traffic.workload import Given, SimRequest, Source, as_request, shared_blocks

Owner = TypeVar("Owner", bound=Hashable)


class Alarms(Generic[Owner]):
    """One alarm per owner; a new alarm replaces the old one. Alarms of one instant ring in the order they were set."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Owner]] = []
        self._current: dict[Owner, tuple[float, int]] = {}
        self._num_set = 0

    def set(self, who: Owner, at: float) -> None:
        """Sets the only alarm of ``who`` to this instant; infinity for never."""
        current = self._current.get(who)
        if current is not None and current[0] == at:
            return
        self._num_set += 1
        self._current[who] = (at, self._num_set)
        if at < math.inf:
            heapq.heappush(self._heap, (at, self._num_set, who))

    @property
    def next_at(self) -> float:
        """Instant of the next alarm; infinity if there is none."""
        while self._heap and self._current[self._heap[0][2]][1] != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def pop(self) -> Owner:
        """Removes the next alarm and returns its owner. Call it only after ``next_at`` returned a finite instant."""
        _, num_set, who = heapq.heappop(self._heap)
        self._current[who] = (math.inf, num_set)
        return who


@dataclass(frozen=True, slots=True)
class Scaling:
    """Bounds of the number of replicas, which follows the predicted queue delay as on a server.

    Attributes:
        target_queue_delay_s, scale_down_after_s: As ``[model]`` has them.
        places: Most requests that a replica runs at once.
        start_s: Seconds from the decision to add a replica until it takes requests: its process, and its weights.
    """

    min_replicas: int
    max_replicas: int
    target_queue_delay_s: float
    scale_down_after_s: float
    places: int
    start_s: float


@dataclass(frozen=True, slots=True)
class FleetShape:
    """The simulated cluster: a number of equal replicas.

    Attributes:
        num_replicas: At the start, or always where there is no ``scaling``.
        announce_s: Interval at which ingress replicas announce their open streams, and so learn which requests a batch
            that broke off has lost; 0 for at once.
        kind: What simulates a replica that has no tiers of KV below its pool.
        image_cache_tokens: Image tokens whose rows the encoder keeps: 256 MiB of rows of 4,096 values of two bytes.
    """

    replica: ReplicaShape
    latency: LatencyModel
    num_replicas: int = 1
    announce_s: float = 0.0
    image_cache_tokens: int = 32_768
    scaling: Scaling | None = None
    kind: type[Replica] = Replica

    def __post_init__(self) -> None:
        if self.replica.num_stages > 1 and self.kind is Replica:
            raise InvalidValueError("kind", self.kind.__name__, "a kind with several batches in flight")


class _Due(Enum):
    """What rings beside the replicas.

    ``MACHINE``: the scheduler over replicas wants to hear that time has passed. ``LOST``: ingress replicas announce
    their streams, and requests of broken batches come back. ``IMAGES``: the rows of a request's pictures are there.
    ``SCALER``: the number of replicas is looked at, and replicas that were started may be ready. ``WAITING``: what
    waits on one replica and could run on another is looked at.
    """

    MACHINE = 0
    LOST = 1
    IMAGES = 2
    SCALER = 3
    WAITING = 4


class Fleet:
    """Runs a workload to its end.

    Args:
        machine: The scheduler over replicas: it places each request, or forms batches that idle replicas pull.
        make_scheduler: A new scheduler for each replica.
        clients: Closed loop: number of requests in flight at any time; each ended request starts the next one, whatever
        its arrival time. None for an open loop.
        timeline: Samples the replicas during the run.
        flush: Called with the present instant when nothing else can happen and requests still wait: no more will
            come, so batches that wait for company without bound become ready.
        make_offload: What answers each replica's scheduler about KV; None where they decide alone, in no time.
        sessions: Counts the turns of sessions, as a server's Router does.

    Attributes:
        refused: Ids of the requests that fit no replica.
        batches: Batches that ended with all their requests, in order; none in continuous batching.
        batches_ended_at: The instants of their ends.
        num_recalled: Requests that a replica gave back before they had run.
    """

    def __init__(
        self,
        shape: FleetShape,
        machine: FleetMachine,
        make_scheduler: Callable[[int], ReplicaScheduler],
        *,
        clients: int | None = None,
        timeline: Timeline | None = None,
        flush: Callable[[float], None] | None = None,
        make_offload: Callable[[int], OffloadDecider | None] = lambda _: None,
        sessions: SessionTable | None = None,
    ) -> None:
        self.sessions = sessions
        self.recorder = Recorder()
        self._shape = shape
        self._num_names = 0
        self.machine = machine
        self.now = 0.0
        self._alarms: Alarms[int | _Due] = Alarms()
        self._clients = clients
        self._timeline = timeline
        self._flush = flush
        self.encoder = SimulatedEncoder(shape.latency.image_cost, shape.image_cache_tokens)
        self._encoding: dict[str, Request] = {}
        self._until = ""
        self._is_over = False
        self._source: Source = Given(())
        self._under_way: dict[str, tuple[Request, Record]] = {}
        self._started: list[StartedRequest] = []
        self._ended: list[FinishedSequence] = []
        self._broken: deque[tuple[str, tuple[Key, ...]]] = deque()
        self._lost: list[str] = []  # requests of broken batches, until their ingress replicas learn of it
        self.refused: list[str] = []
        self.num_recalled = 0
        self._looks = False
        self.batches: list[BatchEnded] = []
        self.batches_ended_at: list[float] = []
        self._make: Callable[[int], Replica] = lambda index: self._make_replica(
            index, make_scheduler(index), make_offload(index)
        )
        self.replicas = [self._make(index) for index in range(shape.num_replicas)]
        for each in self.replicas:
            self._tell(ReplicaUp(each.name, each.ready))
        self._scaler = None if shape.scaling is None else ReplicaScaler(shape.scaling)
        self._began_at = dict.fromkeys(range(shape.num_replicas), 0.0)  # of replicas that are there or start
        self._ready_at: dict[int, float] = {}
        self._draining: set[int] = set()
        self._past_s = 0.0

    def _make_replica(self, index: int, scheduler: ReplicaScheduler, offload: OffloadDecider | None) -> Replica:
        told = self._start, self._end, self._break_off
        shape = self._shape
        kind = shape.kind if shape.replica.below is None else TieredReplica
        return kind(str(index), scheduler, shape.replica, shape.latency, self.recorder, *told, offload)

    def run(
        self,
        arrivals: Iterable[SimRequest] | Source,
        progress: Callable[[int], None] | None = None,
        *,
        until: str = "",
    ) -> Recorder:
        """Runs all arrivals to the last token, or until one request of an open loop has ended.

        Args:
            arrivals: In order of arrival, read lazily; or a source that hears of each end.
            progress: Called after each ended request with the number of ended requests.
            until: Id of that request; empty for none.
        """
        self._until = until
        with _without_collections():
            if not isinstance(arrivals, Iterable):
                self._source = arrivals
            elif self._clients is not None:
                self._run_closed(iter(arrivals), progress)
                return self.recorder
            else:
                self._source = Given(arrivals)
            self._run_open(progress)
        return self.recorder

    def _run_open(self, progress: Callable[[int], None] | None) -> None:
        self._look_at_scale()
        while not self._is_over:
            arrives_at, wakes_at = self._source.next_at, self._alarms.next_at
            if min(arrives_at, wakes_at) == math.inf:
                if not self._flush_waiting():
                    return
                continue
            self.now = min(arrives_at, wakes_at)
            self._look()
            if wakes_at <= arrives_at:
                self._wake(progress)
            else:
                self._arrive(self._source.take(self.now))

    def _run_closed(self, source: Iterator[SimRequest], progress: Callable[[int], None] | None) -> None:
        while True:
            free = (self._clients or 0) - len(self._under_way)
            if arrivals := [replace(each, arrived_at=self.now) for each in itertools.islice(source, free)]:
                self._arrive(arrivals)
            wakes_at = self._alarms.next_at
            if wakes_at == math.inf:
                if arrivals or self._flush_waiting():
                    continue  # The replicas refused all of them, or batches have become ready.
                return
            self.now = wakes_at
            self._look()
            self._wake(progress)

    @property
    def replica_s(self) -> float:
        """Seconds of all replicas together, each from the decision to add it until it is empty and removed."""
        return self._past_s + sum(self.now - began_at for began_at in self._began_at.values())

    def _scale(self, scaling: Scaling, scaler: ReplicaScaler) -> None:
        """Starts replicas, lets those that are ready take requests, drains one and removes what is drained."""
        for index in [index for index, ready_at in self._ready_at.items() if ready_at <= self.now]:
            del self._ready_at[index]
            self._tell(ReplicaUp(self.replicas[index].name, self.replicas[index].ready))
        for index in [index for index in self._draining if not self.machine.num_on(str(index))]:
            self._draining.remove(index)
            self._past_s += self.now - self._began_at.pop(index)
            self._tell(ReplicaGone(str(index)))
        there = sorted(self._began_at.keys() - self._draining)
        joins = not isinstance(self.machine, BatchScheduler)
        outlook = self.machine.outlook(scaling.places, self._shape.latency.cost, joins=joins)
        wanted = scaler.wanted(outlook, len(there), self.now)
        for _ in range(wanted - len(there)):
            index = len(self.replicas)
            self.replicas.append(self._make(index))
            self._began_at[index] = self.now
            self._ready_at[index] = self.now + scaling.start_s
        if wanted < len(there):
            self._draining.add(there[-1])
            self._tell(ReplicaDraining(str(there[-1])))

    def _look_at_scale(self) -> None:
        """Looks at the number of replicas as often as a server does, while anything runs or comes."""
        if self._scaler is not None and self._shape.scaling is not None:
            self._scale(self._shape.scaling, self._scaler)
            if self._under_way or self._source.next_at < math.inf:
                self._alarms.set(_Due.SCALER, self.now + LOOK_S)

    def _look_at_waiting(self) -> None:
        """Looks at what waits as often as a server does, while anything else is to happen."""
        self._looks = min(self._alarms.next_at, self._source.next_at) < math.inf
        if self._looks:
            self._tell(TimePassed())
            self._alarms.set(_Due.WAITING, self.now + LOOK_AT_WAITING_S)

    def _flush_waiting(self) -> bool:
        """Makes batches that wait for company ready; whether anything can happen now."""
        if self._flush is None or not self._under_way:
            return False
        self._flush(self.now)
        self._tell(TimePassed())
        return self._alarms.next_at < math.inf

    def _look(self) -> None:
        """Checks invariants between events."""
        if self._timeline is not None:
            self._timeline.advance(self.now, self.replicas)

    def _wake(self, progress: Callable[[int], None] | None) -> None:
        match self._alarms.pop():
            case int(index):
                self._wake_replica(index, progress)
            case _Due.MACHINE:
                self._tell(TimePassed())
            case _Due.LOST:
                self._resume_lost()
            case _Due.IMAGES:
                self._submit_encoded()
            case _Due.SCALER:
                self._look_at_scale()
            case _Due.WAITING:
                self._look_at_waiting()

    def _wake_replica(self, index: int, progress: Callable[[int], None] | None) -> None:
        replica = self.replicas[index]
        replica.wake(self.now)
        self._alarms.set(index, replica.wakes_at)
        self._tell_broken()
        if self._started:
            started, self._started = tuple(self._started), []
            self._tell(RequestsStarted(started))
        if self._ended:
            ended, self._ended = tuple(self._ended), []
            self._tell(RequestsEnded(ended))
            if progress is not None:
                progress(len(self.recorder.done))

    def _arrive(self, arrivals: list[SimRequest]) -> None:
        requests = []
        for arrival in arrivals:
            request = self._request(arrival)
            if self.sessions is not None:
                self.sessions.began(request, self.now)
            self._under_way[request.request_id] = request, Record.of(arrival)
            if self.encoder.submit(request.request_id, arrival.images):
                requests.append(request)
            else:
                self._encoding[request.request_id] = request
        self.encoder.begin(self.now)
        self._alarms.set(_Due.IMAGES, self.encoder.ends_at)
        if requests:
            self._tell(RequestsArrived(tuple(requests)))
        if self.machine.recalls and not self._looks:
            self._look_at_waiting()

    def _submit_encoded(self) -> None:
        ready = [self._encoding.pop(request_id) for request_id in self.encoder.finish(self.now)]
        self._alarms.set(_Due.IMAGES, self.encoder.ends_at)
        if ready:
            self._tell(RequestsArrived(tuple(ready)))

    def _tell(self, event: GlobalEvent) -> None:
        """Tells the scheduler over replicas, and carries out what it answers."""
        for instruction in self.machine.handle(event, self.now):
            match instruction:
                case PlaceRequests(name, requests):
                    self._place(int(name), requests)
                case RecallRequests(name, keys):
                    given = self.replicas[int(name)].recall(keys, self.now)
                    self._alarms.set(int(name), self.replicas[int(name)].wakes_at)
                    self.num_recalled += len(given)
                    self._tell(RequestsReturned(name, given))
                case RefuseRequest(request_id):
                    self.refused.append(request_id)
                    del self._under_way[request_id]
                    self._source.ended(request_id, self.now)
                case BatchEnded():
                    self.batches.append(instruction)
                    self.batches_ended_at.append(self.now)
        self._tell_broken()
        if isinstance(self.machine, BatchScheduler):
            due_at = self.machine.next_due_at
            self._alarms.set(_Due.MACHINE, math.inf if due_at is None else max(due_at, self.now))

    def _place(self, index: int, requests: tuple[Request, ...]) -> None:
        replica = self.replicas[index]
        replica.submit([(each, self._under_way[each.request_id][1]) for each in requests], self.now)
        self._alarms.set(index, replica.wakes_at)

    def _break_off(self, name: str, keys: tuple[Key, ...]) -> None:
        self._broken.append((name, keys))

    def _tell_broken(self) -> None:
        """Tells of batches that ran out of memory; their requests come back with the next announcement."""
        while self._broken:
            name, keys = self._broken.popleft()
            self._lost += [request_id for request_id, _ in keys]
            self._tell(ReplicaBroke(name, keys))
            every_s = self._shape.announce_s
            self._alarms.set(_Due.LOST, (self.now // every_s + 1) * every_s if every_s else self.now)

    def _resume_lost(self) -> None:
        """Ingress replicas resume what they have learned to be lost: the next attempts, with the tokens of before."""
        resumed = []
        for request_id in self._lost:
            request, record = self._under_way[request_id]
            output_ids = (0,) * record.num_tokens
            resumed.append(replace(request, attempt=request.attempt + 1, output_ids=output_ids))
            self._under_way[request_id] = resumed[-1], record
        self._lost.clear()
        self._tell(RequestsArrived(tuple(resumed)))

    def _request(self, arrival: SimRequest) -> Request:
        """With the block names of its prompt: first the shared blocks, then its own blocks with negative names."""
        shape = self._shape.replica
        images = arrival.spans(shape.block_size)
        if not shape.shares_prefixes:
            return as_request(arrival, images=images)
        shared = shared_blocks(arrival.prefix, arrival.images, images, shape.block_size) if images else arrival.prefix
        num_own = arrival.prompt_len // shape.block_size - len(shared)
        self._num_names += max(0, num_own)
        return as_request(arrival, shared + tuple(range(-self._num_names, -self._num_names + num_own)), images)

    def _start(self, record: Record, queue_s: float) -> None:
        request, _ = self._under_way[record.arrival.request_id]
        self._started.append(StartedRequest(request.request_id, request.attempt, record.cached_len, queue_s))

    def _end(self, record: Record, finished: FinishedSequence) -> None:
        del self._under_way[finished.request_id]
        self._ended.append(finished)
        if self.sessions is not None:
            self.sessions.ended(finished, self.now)
        self._source.ended(finished.request_id, self.now)
        self._is_over = self._is_over or finished.request_id == self._until


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Turns off garbage collection: a run creates no reference cycles, and the search for cycles among millions of
    records takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
