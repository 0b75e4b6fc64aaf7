"""The table of requests in flight: which replica runs each, which wait for one, and what the replicas can hold.

``GlobalScheduler`` and ``BatchScheduler`` each hold one. How a request finds its replica is their business; aborts,
announcements, losses and ends are the same for both and are done here. Nothing here has to survive: the ingress
replicas announce their open streams and the Schedulers their replicas, and from both a new table learns all that the
old one knew. Announcements are sums, which name no request: what they cost does not grow with what is in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from farsight.core.errors import IntegrityError
from farsight.core.forecast import Forecast, ForecastMade
from farsight.core.key_sums import KeySums
from farsight.core.messages.plans import FinishedSequence, WorkerReady
from farsight.core.messages.requests import Demand, Key, OpenRequest
from farsight.core.request import Request, SequenceStatus
from farsight.policies.fleet.events import (
    AbortOnReplica,
    AskIngress,
    AskReplica,
    GlobalInstruction,
    IngressAnnounced,
    ReportLost,
)
from farsight.policies.fleet.fleet_replica import Entry, FleetReplica, Moved, PlacedDemand
from farsight.policies.lengths.law import variance as length_variance
from farsight.policies.placement.base import Choice, ReplicaLoad
from farsight.policies.replica.events import RefuseRequest

OnRemoved = Callable[[str, Entry | None, int | None], None]
"""Called for each request that is no longer in flight: its id, its record if it was placed, and the tokens of its
output if the output is complete. Also called for a request that is not in the table, since the owner may know of it."""


class RequestTable:
    """Every request in flight, placed or queued, and the replicas.

    Args:
        on_removed: Called after each removal.

    Attributes:
        mean_output_len: Output tokens expected of a request without a forecast; None if unknown.
        usual: Forecast of a request that has none of its own; None if unknown.
    """

    def __init__(self, on_removed: OnRemoved) -> None:
        self._on_removed = on_removed
        self._replicas: dict[str, FleetReplica] = {}
        self._entries: dict[str, Entry] = {}
        self._queued: dict[str, Entry] = {}  # of these, what waits for a replica
        self._waiting = PlacedDemand()  # what that asks for
        self._of_ingress: defaultdict[str, KeySums] = defaultdict(KeySums)  # attempts, placed or queued
        self._gone: set[str] = set()  # replicas given up: what an ingress replica still has there is lost
        self._open: tuple[ReplicaLoad, ...] | None = None  # replicas that take requests; None if that has changed
        self._open_max_len = 0  # tokens that a sequence may reach on each of them
        self._open_version: int | None = None  # of the weights of each of them; None if they differ
        self.mean_output_len: float | None = None
        self.usual: Forecast | None = None
        self._usual_variance = 0.0

    def learn_lengths(self, usual: Forecast) -> None:
        """Sets the forecast of requests that have none of their own."""
        self.mean_output_len, self.usual = usual.mean, usual
        self._usual_variance = length_variance(usual)

    # -- Replicas

    def loads(self) -> tuple[ReplicaLoad, ...]:
        """Returns every replica that takes requests, in the order they were heard of; O(1) while they are the same."""
        if self._open is None:
            takers = [each for each in self._replicas.values() if each.takes]
            self._open = tuple(each.load for each in takers)
            self._open_max_len = min((each.ready.max_model_len for each in takers if each.ready), default=0)
            versions = {each.ready.model_version for each in takers if each.ready}
            self._open_version = versions.pop() if len(versions) == 1 else None
        return self._open

    def replicas(self) -> Iterable[FleetReplica]:
        """Returns every known replica."""
        return self._replicas.values()

    def replica(self, name: str) -> FleetReplica | None:
        """Returns a replica; None if the name is not known."""
        return self._replicas.get(name)

    def _known(self, name: str) -> FleetReplica:
        return self._replicas.setdefault(name, FleetReplica(ReplicaLoad(name, 0, 0.0)))

    def bring_up(self, name: str, ready: WorkerReady) -> bool:
        """Marks a replica as taking requests; returns whether its worker life is another than the last one heard of."""
        replica = self._known(name)
        if replica.up and replica.ready == ready:
            return False
        self._gone.discard(name)
        before, replica.ready, replica.up = replica.ready, ready, True
        self._open = None
        for request_id, entry in list(replica.requests.items()):
            if entry.worker_incarnation != ready.worker_incarnation:
                self.remove(request_id)  # it went down with the worker; its ingress replica resumes it
        return before is None or before.worker_incarnation != ready.worker_incarnation

    def compare(self, name: str, sums: bytes | None, now: float) -> list[GlobalInstruction]:
        """Asks a replica about the attempts that its sums say it may not know; ``sums`` None: about none."""
        own = self._replicas[name].sums
        differing = () if sums is None else own.keys(own.differing(sums))
        keys = tuple(key for key in differing if not self._entries[key[0]].is_recalled(now))
        return [AskReplica(name, keys)] if keys else []

    def set_away(self, name: str) -> None:
        """Marks a replica as taking no requests for now; requests in flight on it may go on."""
        self._known(name).up = False
        self._open = None

    def drain(self, name: str, *, ends: bool = False) -> None:
        """Stops the placement of requests on a replica; with ``ends``, allows it again."""
        self._known(name).draining = not ends
        self._open = None

    def drop_replica(self, name: str) -> None:
        """Removes a replica that will not come back, and the requests in flight on it."""
        for request_id in list(self._known(name).requests):
            self.remove(request_id)
        del self._replicas[name]
        self._gone.add(name)
        self._open = None

    # -- Requests

    @property
    def num_in_flight(self) -> int:
        return len(self._entries)

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    def entry(self, request_id: str) -> Entry | None:
        """Returns the record of a placed request; None if it is not placed."""
        entry = self._entries.get(request_id)
        return entry if entry is not None and entry.replica else None

    def queued(self, request_id: str) -> Request | None:
        """Returns a request that waits for a replica; None if it does not wait."""
        entry = self._queued.get(request_id)
        return None if entry is None else entry.request

    def queued_among(self, keys: Iterable[Key]) -> list[tuple[Request, float]]:
        """Returns the waiting requests among these attempts, or earlier ones of them, and since when each waits."""
        found = ((self._queued.get(request_id), attempt) for request_id, attempt in keys)
        return [(each.request, each.since) for each, most in found if each and each.request and each.attempt <= most]

    def all_queued(self) -> tuple[tuple[Request, float], ...]:
        """Returns every request that waits for a replica, and since when. O(waiting)."""
        return tuple((each.request, each.since) for each in self._queued.values() if each.request)

    def keys_on(self, replica: str) -> Iterator[Key]:
        """Yields the attempts that are placed on a known replica."""
        return self._replicas[replica].sums.all_keys()

    def attempt_of(self, request_id: str) -> int | None:
        """Returns the attempt in flight; None if there is none."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.attempt

    def demand(self) -> Demand:
        """Returns the demand in flight, except on external servers, for the predicted queue delay. O(replicas)."""
        own = [each for each in self._replicas.values() if not each.is_external]
        parts = [self._waiting, *(each.demand for each in own)]
        return Demand(
            num_requests=sum(len(each.requests) for each in own) + len(self._queued),
            num_waiting=len(self._queued),
            num_busy=sum(bool(each.requests) for each in own),
            known_tokens=sum(each.known_tokens for each in parts),
            cached_tokens=sum(each.cached_tokens for each in parts),
            output_tokens=sum(each.output_tokens for each in parts),
            output_variance=sum(each.output_variance for each in parts),
            num_with_targets=sum(each.num_with_targets for each in parts),
        )

    def accept(self, requests: Iterable[Request]) -> tuple[list[Request], list[GlobalInstruction]]:
        """Returns requests that are no duplicates, for the caller to place or queue, and aborts of earlier attempts."""
        fresh: dict[str, Request] = {}
        superseded = []
        for request in requests:
            earlier = fresh.get(request.request_id)  # of the same message
            known = self.attempt_of(request.request_id) if earlier is None else earlier.attempt
            if known is not None and known >= request.attempt:
                continue
            if earlier is None and known is not None:
                superseded.append((request.request_id, known))
            fresh[request.request_id] = request
        return list(fresh.values()), self.abort(superseded)

    def fitting(self, request: Request) -> tuple[ReplicaLoad, ...]:
        """Returns the ``loads()`` that can hold the request at its longest; usually all, then ``loads()`` itself."""
        loads = self.loads()
        fits_all = request.max_total_len <= self._open_max_len and request.model_version == self._open_version
        if fits_all and not request.own_engine_field:
            return loads
        return tuple(load for load in loads if self._replicas[load.name].fits(request))

    def never_fits(self, request: Request) -> bool:
        """Returns whether replicas take requests and no known replica could ever hold this request.

        A request whose weights no known replica runs waits: a Router that has just started may not know the replica.
        """
        return bool(self.loads()) and not any(replica.holds(request) for replica in self._replicas.values())

    def refuse(self, request: Request) -> RefuseRequest:
        """Refuses a request that never fits, with the reason, and unqueues it without a call of ``on_removed``."""
        self._leave(request.request_id)
        known = [replica.ready for replica in self._replicas.values() if replica.ready is not None]
        field = request.own_engine_field
        if field and all(ready.external for ready in known):
            message = "none (nor best_of or echo with it): other servers answer here, which are not asked for it"
            return RefuseRequest(request.request_id, request.attempt, field, message)
        limit = max(ready.max_model_len for ready in known)
        message = f"prompt and max_tokens make {request.max_total_len} tokens, a worker holds at most {limit}"
        return RefuseRequest(request.request_id, request.attempt, "max_tokens", message)

    def enqueue(self, request: Request, now: float) -> None:
        """Queues a request for a replica; a request that is queued already keeps the start of its wait."""
        if request.request_id not in self._queued:
            entry = self._queued[request.request_id] = self._entries[request.request_id] = self._record(request, now)
            self._waiting.add(entry, 1)
            self._of_ingress[request.ingress_id].put(request.request_id, request.attempt)

    def place(self, request: Request, choice: Choice, now: float, moved: Moved | None = None) -> None:
        """Enters a request, queued, new or recalled from another replica, on the chosen replica."""
        replica = self._replicas[choice.replica]
        assert replica.ready is not None
        queued = self._unqueue(request.request_id)
        entry = self._record(request, now)
        entry.request, entry.choice, entry.replica = None, choice, choice.replica
        entry.worker_incarnation = replica.ready.worker_incarnation
        entry.waited_s = 0.0 if queued is None else now - queued.since
        entry.moved = moved
        self._enter(request.request_id, entry)

    def _record(self, request: Request, now: float) -> Entry:
        """Makes the record of a request that is on no replica yet."""
        return Entry(
            request.attempt,
            request.ingress_id,
            request,
            now,
            known_len=request.known_len,
            expected_len=self._expected_len(request),
            most_len=request.max_total_len - request.known_len,
            variance=self._variance(request),
            has_target=request.wants_speed,
            work_tokens=self._work(request),
        )

    def _enter(self, request_id: str, entry: Entry) -> None:
        self._replicas[entry.replica].enter(request_id, entry)
        self._entries[request_id] = entry
        self._of_ingress[entry.ingress_id].put(request_id, entry.attempt)

    def _unqueue(self, request_id: str) -> Entry | None:
        """Takes a request out of those that wait, if it is one of them."""
        entry = self._queued.pop(request_id, None)
        if entry is not None:
            self._waiting.add(entry, -1)
            if not self._queued:
                self._waiting = PlacedDemand()  # sums of fractions leave rounding errors
        return entry

    def _work(self, request: Request) -> float:
        """Returns known tokens plus the output still to expect: the mean, at most the requested length."""
        most = float(request.max_total_len - request.known_len)
        expected = most if self.mean_output_len is None else min(most, self.mean_output_len)
        return request.known_len + expected

    def _expected_len(self, request: Request) -> float:
        """Returns the output tokens still to come: by the request's forecast, else the mean, else the limit."""
        most = float(request.max_total_len - request.known_len)
        predicted = self.mean_output_len if request.forecast is None else request.forecast.mean
        return most if predicted is None else min(most, max(1.0, predicted - len(request.output_ids)))

    def predicted_len(self, request: Request) -> float:
        """Returns the tokens that a request will hold at its predicted end."""
        return request.known_len + self._expected_len(request)

    def start(self, request_id: str, entry: Entry) -> None:
        """Books that a placed request has run for the first time."""
        self._replicas[entry.replica].waiting.pop(request_id, None)

    def _variance(self, request: Request) -> float:
        """Returns the variance of ``_expected_len``, in tokens squared."""
        if request.sampling.ignore_eos:
            return 0.0
        return self._usual_variance if request.forecast is None else length_variance(request.forecast)

    def foresee(self, made: Iterable[ForecastMade]) -> tuple[list[ForecastMade], list[ForecastMade]]:
        """Takes in forecasts made after their requests had arrived; returns those of queued and of placed requests."""
        queued, placed = [], []
        for each in made:
            entry = self._entries.get(each.request_id)
            if entry is None or entry.attempt != each.attempt:
                continue
            if entry.request is not None:
                queued.append(each)
                demand, entry.request = self._waiting, replace(entry.request, forecast=each.forecast)
            else:
                placed.append(each)
                demand = self._replicas[entry.replica].demand
            if entry.attempt == 0:  # later attempts bring their forecasts with them
                demand.add(entry, -1)
                entry.expected_len = min(entry.most_len, each.forecast.mean)
                entry.variance = length_variance(each.forecast)
                demand.add(entry, 1)
        return queued, placed

    def remove(self, request_id: str, output_len: int | None = None) -> None:
        """Removes a request from flight; ``output_len``: tokens of an output that is complete."""
        entry = self._leave(request_id)
        self._on_removed(request_id, entry if entry is not None and entry.replica else None, output_len)

    def _leave(self, request_id: str) -> Entry | None:
        self._unqueue(request_id)
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._of_ingress[entry.ingress_id].discard(request_id)
            if entry.replica:
                self._replicas[entry.replica].remove(request_id)
        return entry

    def end(self, finished: Iterable[FinishedSequence]) -> None:
        """Removes attempts that have ended on their replica."""
        for end in finished:
            entry = self.entry(end.request_id)
            if entry is not None and entry.attempt == end.attempt:
                whole = end.status in (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH)
                self.remove(end.request_id, end.output_len if whole else None)

    def abort(self, keys: Iterable[Key]) -> list[GlobalInstruction]:
        """Removes these attempts, or earlier ones, and has the replicas that may run them forget them."""
        by_replica: dict[str, list[Key]] = {}
        for request_id, attempt in keys:
            entry = self._entries.get(request_id)
            if entry is None or entry.attempt > attempt:
                # Not ours, but a replica may run it: an attempt that an earlier Router placed, or that we replaced.
                for name in self._replicas:
                    by_replica.setdefault(name, []).append((request_id, attempt))
                continue
            if entry.replica:
                by_replica.setdefault(entry.replica, []).append((request_id, attempt))
            self.remove(request_id)
        return [AbortOnReplica(name, tuple(group)) for name, group in by_replica.items()]

    # -- Announcements and losses

    def lose_ingress(self, ingress_id: str) -> list[GlobalInstruction]:
        """Aborts all requests of an ingress replica that is gone, and its clients with it."""
        aborts = self.abort(list(self._of_ingress[ingress_id].all_keys()))
        del self._of_ingress[ingress_id]
        return aborts

    def reconcile(self, announced: IngressAnnounced, now: float) -> list[GlobalInstruction]:
        """Takes over the open streams that an ingress replica lists, and asks it for other parts that differ.

        Aborts its streams that are closed, asks replicas whether they know the others, and reports those that none has.
        """
        ingress_id = announced.ingress_id
        lost: list[Key] = []
        asked: dict[str, list[Key]] = {}
        still_open = set()
        for stream in announced.open:
            still_open.add(stream.request_id)
            key = (stream.request_id, stream.attempt)
            known = self.attempt_of(stream.request_id)
            if known is None or known < stream.attempt:
                self.remove(stream.request_id)
                if not self._adopt(ingress_id, stream):
                    lost.append(key)
                    continue
            entry = self.entry(stream.request_id)
            if entry is not None and entry.attempt == stream.attempt and not entry.is_recalled(now):
                asked.setdefault(entry.replica, []).append(key)
        own = self._of_ingress[ingress_id]
        aborts = self.abort([key for key in own.keys(announced.listed) if key[0] not in still_open])
        asks = [AskReplica(name, tuple(keys)) for name, keys in asked.items() if self._replicas[name].up]
        reports = [ReportLost(ingress_id, tuple(lost))] if lost else []
        others = tuple(part for part in own.differing(announced.sums) if part not in announced.listed)
        parts = [AskIngress(ingress_id, others)] if others else []
        return [*aborts, *asks, *reports, *parts]

    def _adopt(self, ingress_id: str, stream: OpenRequest) -> bool:
        """Enters a stream that an earlier Router placed; False if it was never placed or its worker life is over."""
        if not stream.replica or stream.replica in self._gone:
            return False
        ready = self._known(stream.replica).ready
        if ready is not None and ready.worker_incarnation != stream.worker_incarnation:
            return False
        work_tokens = float(stream.work_tokens)
        expected_len = work_tokens if self.mean_output_len is None else min(work_tokens, self.mean_output_len)
        entry = Entry(
            attempt=stream.attempt,
            ingress_id=ingress_id,
            replica=stream.replica,
            worker_incarnation=stream.worker_incarnation,
            known_len=work_tokens - expected_len,
            expected_len=expected_len,
            most_len=work_tokens,
            work_tokens=work_tokens,
        )
        self._enter(stream.request_id, entry)
        return True

    def drop_unknown(self, replica: str, keys: Iterable[Key]) -> list[GlobalInstruction]:
        """Removes attempts that a replica's Scheduler does not know, and reports them as lost."""
        lost: dict[str, list[Key]] = {}
        for request_id, attempt in keys:
            entry = self._entries.get(request_id)
            if entry is not None and (entry.attempt, entry.replica) == (attempt, replica):
                lost.setdefault(entry.ingress_id, []).append((request_id, attempt))
                self.remove(request_id)
        return [ReportLost(ingress_id, tuple(group)) for ingress_id, group in lost.items()]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the table, the queue and the replicas' sums agree."""
        held = {key: each for replica in self._replicas.values() for key, each in replica.requests.items()}
        if held | self._queued != self._entries or held.keys() & self._queued.keys():
            raise IntegrityError("the records, the replicas and the queue disagree")
        if any(bool(each.replica) == bool(each.request) for each in self._entries.values()):
            raise IntegrityError("a request is placed and waits, or does neither")
        owners = {key: ingress_id for ingress_id, sums in self._of_ingress.items() for key in sums.all_keys()}
        if owners != {(request_id, each.attempt): each.ingress_id for request_id, each in self._entries.items()}:
            raise IntegrityError("the records and the sums by ingress replica disagree")
        for replica in self._replicas.values():
            load, work_tokens = replica.load, sum(each.work_tokens for each in replica.requests.values())
            if load.num_requests != len(replica.requests):
                raise IntegrityError(f"{load.name}: {load.num_requests} requests are counted")
            if abs(load.work_tokens - work_tokens) > 1e-6 * max(1.0, work_tokens):
                raise IntegrityError(f"{load.name}: {load.work_tokens} is not the sum of its work")
