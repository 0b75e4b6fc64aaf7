"""What the shell asks of a scheduler over replicas, whichever it hosts."""

from __future__ import annotations

from abc import ABC, abstractmethod

from core.load_snapshot import Demand
from core.messages.placement import PrefixView, ReplicaView
from core.messages.plans import WorkerReady
from core.messages.requests import Placed
from core.request import Request
from policies.fleet.events import GlobalEvent, GlobalInstruction
from policies.fleet.request_table import Entry, RequestTable
from policies.placement.base import Choice, ReplicaLoad


class FleetMachine(ABC):
    """A state machine around one table of requests in flight: ``handle`` alone changes it, the rest only reads.

    Attributes:
        goes_by_prefixes: Whether placement looks at the blocks of a prompt.
    """

    goes_by_prefixes: bool = False

    def __init__(self) -> None:
        self._table = RequestTable(self._removed)
        self._now = 0.0  # of the event in hand

    @abstractmethod
    def handle(self, event: GlobalEvent, now: float) -> list[GlobalInstruction]:
        """The only mutator. ``now`` is seconds on the caller's monotonic clock."""

    @abstractmethod
    def _removed(self, request_id: str, entry: Entry | None, output_len: int | None) -> None:
        """The table's ``on_removed``."""

    @property
    def num_in_flight(self) -> int:
        return self._table.num_in_flight

    def loads(self) -> tuple[ReplicaLoad, ...]:
        """Every replica that takes requests, in the order they were heard of; O(1) while they are the same."""
        return self._table.loads()

    def lives(self) -> list[WorkerReady]:
        """The latest worker life of every replica."""
        return [replica.ready for replica in self._table.replicas() if replica.ready is not None]

    def own_takers(self) -> list[WorkerReady]:
        """The worker lives of our own engine, not other servers, that take requests."""
        takers = [each.ready for each in self._table.replicas() if each.takes]
        return [ready for ready in takers if ready is not None and not ready.external]

    def replica_views(self) -> tuple[ReplicaView, ...]:
        """Every replica that is known, for people to look at."""
        return tuple(each.view() for each in self._table.replicas())

    def busiest_prefixes(self, limit: int) -> tuple[PrefixView, ...]:
        """The nodes of the prefix tree that most requests went through lately; none without a prefix tree."""
        return ()

    def num_on(self, replica: str) -> int:
        """Requests placed on a replica and not ended."""
        found = self._table.replica(replica)
        return 0 if found is None else len(found.requests)

    def demand(self) -> Demand:
        """As ``RequestTable.demand``."""
        return self._table.demand()

    def placed(self, request_id: str, attempt: int) -> Placed:
        """Where an attempt was placed; an empty replica if it waits."""
        entry = self._table.entry(request_id)
        if entry is None or entry.attempt != attempt:
            return Placed(request_id, attempt, "", "")
        return Placed(request_id, attempt, entry.replica, entry.worker_incarnation)

    def choice(self, request_id: str) -> Choice | None:
        """Why a request is where it is; None if it is nowhere or an earlier Router placed it."""
        entry = self._table.entry(request_id)
        return None if entry is None else entry.choice

    def waited_s(self, request_id: str) -> float:
        """How long a request waited for a replica that takes requests."""
        entry = self._table.entry(request_id)
        return 0.0 if entry is None else entry.waited_s

    def queued(self, response_id: str) -> list[tuple[Request, float]]:
        """The requests of an answer that wait for a replica, and since when. O(waiting)."""
        queued = self._table.all_queued()
        return [each for each in queued if each[0].origin is not None and each[0].origin.response_id == response_id]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the table, the queue and the replicas' sums agree."""
        self._table.check_integrity()
