"""The scheduler over replicas (``Router``): a state machine, ``handle(event, now) -> [Instruction]``.

``FleetMachine`` is the interface that the shell uses, whichever scheduler it hosts; ``GlobalScheduler`` places requests
as they come. The scheduler decides which replica runs a request; its table remembers that until the request ends. The
``ReplicaScheduler`` decides how a replica runs its requests.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from farsight.core.costs import StepCost
from farsight.core.decisions import Facts
from farsight.core.forecast import ForecastMade
from farsight.core.messages.placement import PrefixView, ReplicaView
from farsight.core.messages.plans import KVCacheEvent, StartedRequest, WorkerReady
from farsight.core.messages.requests import Demand, Key, LoadSnapshot, Placed
from farsight.core.request import Request
from farsight.policies.fleet.events import (
    AskCache,
    GlobalEvent,
    GlobalInstruction,
    HistoryLearned,
    IngressAnnounced,
    IngressLost,
    KeysUnknown,
    KVCacheChanged,
    PlaceRequests,
    RecallRequests,
    ReplicaAway,
    ReplicaDraining,
    ReplicaGone,
    ReplicaUp,
    RequestsEnded,
    RequestsReturned,
    RequestsStarted,
    StepsPriced,
    TimePassed,
)
from farsight.policies.fleet.fleet_replica import Entry, Moved
from farsight.policies.fleet.request_table import RequestTable
from farsight.policies.moves.recall import RecallRule
from farsight.policies.placement.base import Choice, Placement, ReplicaLoad
from farsight.policies.replica.events import ForecastsArrived, RequestsAborted, RequestsArrived

ASK_AGAIN_S = 1.0
"""Seconds after which a replica that has not told what it caches is asked again."""


@dataclass(slots=True)
class _Feed:
    """The notices of a replica's worker life.

    Attributes:
        seq: Number of the last notice; None until the life has told all that it caches, and once a notice was lost.
        asked_at: Instant when the replica was last asked for all that it caches.
    """

    ready: WorkerReady
    seq: int | None = None
    asked_at: float = -math.inf


class CacheNotices:
    """Hands each notice to the placement once and in order."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._feeds: dict[str, _Feed] = {}

    def bring_up(self, name: str, ready: WorkerReady, seq: int, now: float) -> list[AskCache]:
        """Registers a replica that takes requests and has sent notices up to ``seq``; asks for missing ones."""
        feed = self._feeds.get(name)
        if feed is None or feed.ready.worker_incarnation != ready.worker_incarnation:
            feed = self._feeds[name] = _Feed(ready)
        feed.ready = ready
        if feed.seq is not None and feed.seq < seq:
            feed.seq = None  # the last one was lost
        return self._ask(name, feed, now)

    def drop(self, name: str) -> None:
        """Forgets a replica that will not come back."""
        self._feeds.pop(name, None)

    def take(self, name: str, incarnation: str, notices: Iterable[KVCacheEvent], now: float) -> list[AskCache]:
        """Hands each notice to the placement once and in order; if one is missing, asks for all that is cached."""
        feed = self._feeds.get(name)
        if feed is None or feed.ready.worker_incarnation != incarnation or not self._is_used(feed.ready):
            return []  # notices of a life that is over, with all that it cached, or of no use
        for notice in notices:
            if feed.seq is not None and notice.seq <= feed.seq:
                continue  # a duplicate, or an answer that later notices have overtaken
            if not notice.whole and (feed.seq is None or notice.seq > feed.seq + 1):
                feed.seq = None
                continue
            feed.seq = notice.seq
            self._placement.noticed(name, notice)
        return self._ask(name, feed, now)

    def _is_used(self, ready: WorkerReady) -> bool:
        """Returns whether the placement can use notices of this life: the blocks must have the placement's size."""
        return not ready.external and ready.block_size == self._placement.block_size

    def _ask(self, name: str, feed: _Feed, now: float) -> list[AskCache]:
        if feed.seq is not None or now < feed.asked_at + ASK_AGAIN_S or not self._is_used(feed.ready):
            return []
        feed.asked_at = now
        return [AskCache(name)]


class FleetMachine(ABC):
    """A state machine around one table of requests in flight: ``handle`` alone changes it, the rest only reads.

    Attributes:
        goes_by_prefixes: Whether placement looks at the blocks of a prompt.
        pulls: Whether the arrival of a request may place others, which waited.
        recalls: Whether ``TimePassed`` may have requests given back that wait on a replica.
    """

    goes_by_prefixes: bool = False
    pulls: bool = False
    recalls: bool = False

    def __init__(self) -> None:
        self._table = RequestTable(self._removed)
        self._now = 0.0  # of the event in hand

    @abstractmethod
    def handle(self, event: GlobalEvent, now: float) -> list[GlobalInstruction]:
        """Applies an event; no other method changes the state. ``now``: seconds on the caller's monotonic clock."""

    @abstractmethod
    def _removed(self, request_id: str, entry: Entry | None, output_len: int | None) -> None:
        """Handles a removal as the table's ``on_removed``."""

    @property
    def num_in_flight(self) -> int:
        return self._table.num_in_flight

    def is_in_flight(self, request_id: str) -> bool:
        """Returns whether an attempt of the request is placed or waits for a replica."""
        return self._table.attempt_of(request_id) is not None

    def loads(self) -> tuple[ReplicaLoad, ...]:
        """Returns every replica that takes requests, in the order they were heard of; O(1) while they are the same."""
        return self._table.loads()

    def lives(self) -> list[WorkerReady]:
        """Returns the latest worker life of every replica."""
        return [replica.ready for replica in self._table.replicas() if replica.ready is not None]

    def own_takers(self) -> list[WorkerReady]:
        """Returns the worker lives of our own engine, not other servers, that take requests."""
        takers = [each.ready for each in self._table.replicas() if each.takes]
        return [ready for ready in takers if ready is not None and not ready.external]

    def outlook(self, max_num_seqs: int, cost: StepCost | None, *, joins: bool) -> LoadSnapshot:
        """Returns the load from which the queue delay is predicted.

        Args:
            max_num_seqs: Most requests that a replica runs at once.
            cost: The cost of the replicas' steps; None while unknown.
            joins: Whether requests join a running batch.
        """
        takers = self.own_takers()
        kv_tokens = min((ready.num_blocks * ready.block_size for ready in takers), default=0)
        lengths = () if self._table.usual is None else self._table.usual.quantiles
        return LoadSnapshot(self.demand(), len(takers), max_num_seqs, kv_tokens, joins, cost, lengths)

    def replica_views(self) -> tuple[ReplicaView, ...]:
        """Returns a view of every known replica, for people to look at."""
        return tuple(each.view() for each in self._table.replicas())

    def busiest_prefixes(self, limit: int) -> tuple[PrefixView, ...]:
        """Returns the nodes of the prefix tree that most requests went through lately; none without a prefix tree."""
        return ()

    def num_on(self, replica: str) -> int:
        """Returns the number of requests placed on a replica and not ended."""
        found = self._table.replica(replica)
        return 0 if found is None else len(found.requests)

    def demand(self) -> Demand:
        """Returns the demand as ``RequestTable.demand`` does."""
        return self._table.demand()

    def placed(self, request_id: str, attempt: int) -> Placed:
        """Returns where an attempt was placed; an empty replica if it waits."""
        entry = self._table.entry(request_id)
        if entry is None or entry.attempt != attempt:
            return Placed(request_id, attempt, "", "")
        return Placed(request_id, attempt, entry.replica, entry.worker_incarnation)

    def choice(self, request_id: str) -> Choice | None:
        """Returns why a request is where it is; None if it is nowhere or an earlier Router placed it."""
        entry = self._table.entry(request_id)
        return None if entry is None else entry.choice

    def told(self, request_id: str) -> Facts:
        """Returns why a placed request is where it is, and how it came there; nothing if it is not placed."""
        entry = self._table.entry(request_id)
        if entry is None or entry.choice is None:
            return {}
        waited = {"waited_s": entry.waited_s} if entry.waited_s else {}
        return {**entry.choice.facts(), **waited, **({} if entry.moved is None else entry.moved.facts())}

    def queued(self, response_id: str) -> list[tuple[Request, float]]:
        """Returns the requests of an answer that wait for a replica, and since when. O(waiting)."""
        queued = self._table.all_queued()
        return [each for each in queued if each[0].origin is not None and each[0].origin.response_id == response_id]

    def queued_among(self, keys: Iterable[Key]) -> list[tuple[Request, float]]:
        """Returns the requests of ``RequestTable.queued_among``."""
        return self._table.queued_among(keys)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the table, the queue and the replicas' sums agree."""
        self._table.check_integrity()


class GlobalScheduler(FleetMachine):
    """Places requests on replicas as they come.

    Args:
        recall: Which requests that wait on a replica are placed again; None for none.
    """

    def __init__(self, placement: Placement, recall: RecallRule | None = None) -> None:
        super().__init__()
        self._placement = placement
        self._recall = recall
        self._reasons: dict[str, str] = {}  # of the latest recall from each replica
        self._cost: StepCost | None = None
        self._notices = CacheNotices(placement)
        self.goes_by_prefixes = placement.block_size > 0
        self.recalls = recall is not None

    def replica_views(self) -> tuple[ReplicaView, ...]:
        """Returns the views of ``FleetMachine``, with the placement's knowledge of each replica."""
        return tuple(map(self._placement.show, super().replica_views()))

    def busiest_prefixes(self, limit: int) -> tuple[PrefixView, ...]:
        """Returns the prefixes of ``Placement.busiest_prefixes``."""
        return self._placement.busiest_prefixes(limit)

    def handle(self, event: GlobalEvent, now: float) -> list[GlobalInstruction]:
        """Does as ``FleetMachine.handle`` says; events of batch mode alone change nothing."""
        self._now = now
        match event:
            case RequestsArrived(requests):
                fresh, aborts = self._table.accept(requests)
                return aborts + self._place_all(fresh)
            case RequestsAborted(keys):
                return self._table.abort(keys)
            case RequestsEnded(finished):
                self._table.end(finished)
            case IngressAnnounced():
                return self._table.reconcile(event, self._now)
            case IngressLost(ingress_id):
                return self._table.lose_ingress(ingress_id)
            case KeysUnknown(replica, keys):
                return self._table.drop_unknown(replica, keys)
            case ReplicaUp(name, ready, cache_seq, sums):
                return self._bring_up(name, ready, cache_seq) + self._table.compare(name, sums, self._now)
            case ReplicaAway(name):
                self._table.set_away(name)
            case ReplicaDraining(name, ends):
                self._table.drain(name, ends=ends)
            case ReplicaGone(name):
                self._drop_replica(name)
            case HistoryLearned(forecast):
                self._table.learn_lengths(forecast)
            case ForecastsArrived(made):
                self._foresee(made)
            case RequestsStarted(started):
                self._start(started)
            case RequestsReturned(name, requests):
                return self._place_returned(name, requests)
            case TimePassed():
                return self._look_at_waiting()
            case KVCacheChanged(name, worker_incarnation, notices):
                return [*self._notices.take(name, worker_incarnation, notices, now)]
            case StepsPriced(name, cost):
                if self._table.replica(name) is not None:
                    self._placement.priced(name, cost)
                    self._cost = cost
        return []

    def _bring_up(self, name: str, ready: WorkerReady, cache_seq: int) -> list[GlobalInstruction]:
        if self._table.bring_up(name, ready):
            self._placement.replica_up(name, ready.num_blocks * ready.block_size)
        asks = self._notices.bring_up(name, ready, cache_seq, self._now)
        return [*asks, *self._place_all([request for request, _ in self._table.all_queued()])]

    def _drop_replica(self, name: str) -> None:
        self._table.drop_replica(name)
        self._notices.drop(name)
        self._placement.replica_gone(name)

    def _look_at_waiting(self) -> list[GlobalInstruction]:
        """Recalls what has waited for long enough on one replica and could run at once on another."""
        if self._recall is None:
            return []
        own = [each for each in self._table.replicas() if not each.is_external]
        if not any(each.waiting for each in own):
            return []
        crowds = [each.crowd(lists=True) for each in own]
        out: list[GlobalInstruction] = []
        for recalled in self._recall.choose(crowds, self._cost, self._now):
            self._reasons[recalled.replica] = recalled.reason
            for request_id, _ in recalled.keys:
                entry = self._table.entry(request_id)
                assert entry is not None, "what waits on a replica is placed"
                entry.asked_at = self._now
            out.append(RecallRequests(recalled.replica, recalled.keys))
        return out

    def _place_returned(self, name: str, requests: Iterable[Request]) -> list[GlobalInstruction]:
        """Places requests that a replica has given back, elsewhere if possible; others have left or go on already."""
        moved, returned = {}, []
        for request in requests:
            entry = self._table.entry(request.request_id)
            if entry is None or (entry.attempt, entry.replica) != (request.attempt, name):
                continue
            num = 1 if entry.moved is None else entry.moved.num + 1
            because = Moved(name, self._reasons.get(name, ""), self._now - entry.since, num)
            moved[request.request_id] = because
            returned.append(request)
            self._table.remove(request.request_id)
        return self._place_all(returned, moved)

    def _place_all(
        self, requests: Iterable[Request], moved: Mapping[str, Moved] | None = None
    ) -> list[GlobalInstruction]:
        placed: dict[str, list[Request]] = {}
        refused: list[GlobalInstruction] = []
        for request in requests:
            choice = self._place(request, None if moved is None else moved[request.request_id])
            if choice is not None:
                cached_len = choice.hit_len - choice.pending_len
                if cached_len:
                    request = replace(request, expected_cached_len=cached_len)
                placed.setdefault(choice.replica, []).append(request)
            elif self._table.never_fits(request):
                refused.append(self._table.refuse(request))
            else:
                self._table.enqueue(request, self._now)
        return [PlaceRequests(name, tuple(group)) for name, group in placed.items()] + refused

    def _place(self, request: Request, moved: Moved | None) -> Choice | None:
        """Places a request; returns None if no replica that takes requests can hold the request."""
        fitting = self._table.fitting(request)
        if moved is not None:
            fitting = self._with_room(request, moved.origin, fitting)
        if not fitting:
            return None
        choice = self._placement.choose(request, request.prefix_hashes, fitting, self._now)
        self._table.place(request, choice, self._now, moved)
        return choice

    def _with_room(self, request: Request, origin: str, fitting: tuple[ReplicaLoad, ...]) -> tuple[ReplicaLoad, ...]:
        """Returns the replicas where a recalled request could run at once; else all others; else its own."""
        assert self._recall is not None, "nothing is recalled without a rule"
        others = tuple(load for load in fitting if load.name != origin)
        tokens = self._table.predicted_len(request)
        replicas = ((load, self._table.replica(load.name)) for load in others)
        rooms = (load for load, each in replicas if each and self._recall.has_room(each.crowd(lists=False), tokens))
        return tuple(rooms) or others or fitting

    def _foresee(self, made: Iterable[ForecastMade]) -> None:
        _, placed = self._table.foresee(made)
        for each in placed:
            self._placement.foreseen(each.request_id, each.forecast, self._now)

    def _start(self, started: Iterable[StartedRequest]) -> None:
        for start in started:
            entry = self._table.entry(start.request_id)
            if entry is not None and entry.attempt == start.attempt:
                self._table.start(start.request_id, entry)
                self._placement.started(start.request_id, start.cached_len, start.queue_s, self._now)

    def _removed(self, request_id: str, entry: Entry | None, output_len: int | None) -> None:
        if entry is not None:
            self._placement.ended(request_id, output_len, self._now)
