"""A fleet of replicas behind the global scheduler."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from core.messages.cache import StartedRequest
from core.messages.plans import FinishedSequence
from core.request import Request
from policies.fleet.events import PlaceRequests, ReplicaUp, RequestsEnded, RequestsStarted
from policies.fleet.scheduler import GlobalScheduler
from policies.replica.events import RefuseRequest, RequestsArrived
from policies.replica.scheduler import ReplicaScheduler
from simulator.cluster.events import Alarms
from simulator.cluster.latency import LatencyModel
from simulator.cluster.records import Record, Recorder
from simulator.cluster.replica import Replica, ReplicaShape
from simulator.cluster.timeline import Timeline
from simulator.traffic.workload import Arrival, as_request


@dataclass(frozen=True, slots=True)
class FleetShape:
    """The simulated cluster: a number of equal replicas."""

    replica: ReplicaShape
    latency: LatencyModel
    num_replicas: int = 1


class Fleet:
    """Runs a workload to its end.

    Args:
        make_scheduler: A new scheduler for each replica.
        clients: Closed loop: number of requests in flight at any time; each ended request starts the next one, whatever
        its arrival time. None for an open loop.
        timeline: Samples the replicas during the run.
    """

    def __init__(
        self,
        shape: FleetShape,
        router: GlobalScheduler,
        make_scheduler: Callable[[int], ReplicaScheduler],
        *,
        clients: int | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.recorder = Recorder()
        self._shape = shape
        self._num_names = 0
        self.router = router
        self.now = 0.0
        self._alarms = Alarms()
        self._clients = clients
        self._timeline = timeline
        self._next: deque[Arrival] = deque()
        self._under_way: dict[str, tuple[Request, Record]] = {}
        self._started: list[StartedRequest] = []
        self._ended: list[FinishedSequence] = []
        self.refused: list[str] = []
        self.replicas = [
            Replica(str(i), make_scheduler(i), shape.replica, shape.latency, self.recorder, self._start, self._end)
            for i in range(shape.num_replicas)
        ]
        for each in self.replicas:
            self.router.handle(ReplicaUp(each.name, each.ready), 0.0)

    def run(self, arrivals: Iterable[Arrival], progress: Callable[[int], None] | None = None) -> Recorder:
        """Runs all arrivals to the last token.

        Args:
            arrivals: In order of arrival; read lazily.
            progress: Called after each ended request with the number of ended requests.
        """
        with _without_collections():
            if self._clients is not None:
                self._run_closed(iter(arrivals), progress)
            else:
                self._run_open(iter(arrivals), progress)
        return self.recorder

    def _run_open(self, source: Iterator[Arrival], progress: Callable[[int], None] | None) -> None:
        arrival = next(source, None)
        while True:
            arrives_at = math.inf if arrival is None else arrival.arrived_at
            wakes_at = self._alarms.next_at
            self.now = min(arrives_at, wakes_at)
            if self.now == math.inf:
                return
            self._look()
            if wakes_at <= arrives_at:
                self._wake(progress)
            else:
                together = []  # Requests of one instant arrive together.
                while arrival is not None and arrival.arrived_at <= arrives_at:
                    together.append(arrival)
                    arrival = next(source, None)
                self._arrive(together)

    def _run_closed(self, source: Iterator[Arrival], progress: Callable[[int], None] | None) -> None:
        while True:
            free = (self._clients or 0) - len(self._under_way)
            if arrivals := [replace(each, arrived_at=self.now) for each in itertools.islice(source, free)]:
                self._arrive(arrivals)
            wakes_at = self._alarms.next_at
            if wakes_at == math.inf:
                if arrivals:
                    continue  # The replicas refused all of them.
                return
            self.now = wakes_at
            self._look()
            self._wake(progress)

    def _look(self) -> None:
        """Checks invariants between events."""
        if self._timeline is not None:
            self._timeline.advance(self.now, self.replicas)

    def _wake(self, progress: Callable[[int], None] | None) -> None:
        index = self._alarms.pop()
        replica = self.replicas[index]
        replica.wake(self.now)
        self._alarms.set(index, replica.wakes_at)
        if self._started:
            self.router.handle(RequestsStarted(tuple(self._started)), self.now)
            self._started.clear()
        if self._ended:
            self.router.handle(RequestsEnded(tuple(self._ended)), self.now)
            self._ended.clear()
            if progress is not None:
                progress(len(self.recorder.done))

    def _arrive(self, arrivals: list[Arrival]) -> None:
        requests = [as_request(arrival, self._block_names(arrival)) for arrival in arrivals]
        for request, arrival in zip(requests, arrivals, strict=True):
            self._under_way[request.request_id] = request, Record(arrival)
        for instruction in self.router.handle(RequestsArrived(tuple(requests)), self.now):
            match instruction:
                case PlaceRequests(name, group):
                    index = int(name)
                    placed = [(each, self._under_way[each.request_id][1]) for each in group]
                    self.replicas[index].submit(placed, self.now)
                    self._alarms.set(index, self.replicas[index].wakes_at)
                case RefuseRequest(request_id):
                    self.refused.append(request_id)
                    del self._under_way[request_id]

    def _block_names(self, arrival: Arrival) -> tuple[int, ...]:
        """Block names of a prompt: first the shared blocks, then its own blocks with negative names."""
        shape = self._shape.replica
        if not shape.shares_prefixes:
            return ()
        num_own = arrival.prompt_len // shape.block_size - len(arrival.prefix)
        self._num_names += max(0, num_own)
        return arrival.prefix + tuple(range(-self._num_names, -self._num_names + num_own))

    def _start(self, record: Record, queue_s: float) -> None:
        self._started.append(StartedRequest(record.arrival.request_id, 0, record.cached_len, queue_s))

    def _end(self, record: Record, finished: FinishedSequence) -> None:
        del self._under_way[finished.request_id]
        self._ended.append(finished)


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
