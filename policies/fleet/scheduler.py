"""The scheduler over replicas (``Router``): a state machine, ``handle(event, now) -> [Instruction]``.

It decides which replica runs a request; its table remembers that until the request ends. What a replica does with its
requests is the ``ReplicaScheduler``'s business.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from core.messages.cache import StartedRequest
from core.messages.forecasts import ForecastMade
from core.messages.placement import PrefixView, ReplicaView
from core.messages.plans import WorkerReady
from core.request import Request
from policies.fleet.cache_notices import CacheNotices
from policies.fleet.events import (
    GlobalEvent,
    GlobalInstruction,
    HistoryLearned,
    IngressAnnounced,
    IngressLost,
    KeysUnknown,
    KVCacheChanged,
    PlaceRequests,
    ReplicaAway,
    ReplicaDraining,
    ReplicaGone,
    ReplicaUp,
    RequestsEnded,
    RequestsStarted,
    StepsPriced,
)
from policies.fleet.machine import FleetMachine
from policies.fleet.request_table import Entry
from policies.placement.base import Choice, Placement
from policies.replica.events import ForecastsArrived, RequestsAborted, RequestsArrived


class GlobalScheduler(FleetMachine):
    """Places requests on replicas as they come."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self._placement = placement
        self._notices = CacheNotices(placement)
        self.goes_by_prefixes = placement.block_size > 0

    def replica_views(self) -> tuple[ReplicaView, ...]:
        """As of ``FleetMachine``, with what the placement knows of each."""
        return tuple(map(self._placement.show, super().replica_views()))

    def busiest_prefixes(self, limit: int) -> tuple[PrefixView, ...]:
        """As of ``Placement``."""
        return self._placement.busiest_prefixes(limit)

    def handle(self, event: GlobalEvent, now: float) -> list[GlobalInstruction]:
        """As of ``FleetMachine``; events of batch mode alone change nothing."""
        self._now = now
        match event:
            case RequestsArrived(requests):
                fresh, aborts = self._table.accept(requests)
                return aborts + self._place_all(fresh)
            case RequestsAborted(keys):
                return self._table.abort(keys)
            case RequestsEnded(finished):
                self._table.end(finished)
            case IngressAnnounced(ingress_id, announced):
                return self._table.reconcile(ingress_id, announced)
            case IngressLost(ingress_id):
                return self._table.lose_ingress(ingress_id)
            case KeysUnknown(replica, keys):
                return self._table.drop_unknown(replica, keys)
            case ReplicaUp(name, ready, cache_seq):
                return self._bring_up(name, ready, cache_seq)
            case ReplicaAway(name):
                self._table.set_away(name)
            case ReplicaDraining(name):
                self._table.drain(name)
            case ReplicaGone(name):
                self._drop_replica(name)
            case HistoryLearned(forecast):
                self._table.mean_output_len = forecast.mean
            case ForecastsArrived(made):
                self._foresee(made)
            case RequestsStarted(started):
                self._start(started)
            case KVCacheChanged(name, worker_incarnation, notices):
                return [*self._notices.take(name, worker_incarnation, notices, now)]
            case StepsPriced(name, cost):
                if self._table.replica(name) is not None:
                    self._placement.priced(name, cost)
        return []

    def _bring_up(self, name: str, ready: WorkerReady, cache_seq: int) -> list[GlobalInstruction]:
        if self._table.bring_up(name, ready):
            self._placement.replica_up(name, ready.num_blocks * ready.block_size)
        asks = self._notices.bring_up(name, ready, cache_seq, self._now)
        return [*asks, *self._place_all(self._table.take_queued())]

    def _drop_replica(self, name: str) -> None:
        self._table.drop_replica(name)
        self._notices.drop(name)
        self._placement.replica_gone(name)

    def _place_all(self, requests: Iterable[Request]) -> list[GlobalInstruction]:
        placed: dict[str, list[Request]] = {}
        refused: list[GlobalInstruction] = []
        for request in requests:
            choice = self._place(request)
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

    def _place(self, request: Request) -> Choice | None:
        """None if no replica that takes requests holds it."""
        fitting = self._table.fitting(request)
        if not fitting:
            return None
        choice = self._placement.choose(request, request.prefix_hashes, fitting, self._now)
        self._table.place(request, choice, self._now)
        return choice

    def _foresee(self, made: Iterable[ForecastMade]) -> None:
        _, placed = self._table.foresee(made)
        for each in placed:
            self._placement.foreseen(each.request_id, each.forecast, self._now)

    def _start(self, started: Iterable[StartedRequest]) -> None:
        for start in started:
            entry = self._table.entry(start.request_id)
            if entry is not None and entry.attempt == start.attempt:
                self._placement.started(start.request_id, start.cached_len, start.queue_s, self._now)

    def _removed(self, request_id: str, entry: Entry | None, output_len: int | None) -> None:
        if entry is not None:
            self._placement.ended(request_id, output_len, self._now)
