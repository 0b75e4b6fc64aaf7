"""A replica as the table of requests knows it, and what is in flight on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from farsight.core.decisions import Facts
from farsight.core.key_sums import KeySums
from farsight.core.messages.placement import ReplicaView
from farsight.core.messages.plans import WorkerReady
from farsight.core.request import Request
from farsight.policies.moves.recall import ANSWER_S, Crowd, WaitingRequest
from farsight.policies.placement.base import Choice, ReplicaLoad


@dataclass(frozen=True, slots=True)
class Moved:
    """How a request came from one replica to another.

    Attributes:
        waited_s: Seconds that it waited on the replica before.
        num: How often it has moved so far.
    """

    origin: str
    reason: str
    waited_s: float
    num: int = 1

    def facts(self) -> Facts:
        """Returns them by the names that a decision trace shows."""
        return {"moved_from": self.origin, "because": self.reason, "waited_there_s": self.waited_s}


@dataclass(slots=True, eq=False)
class Entry:
    """The one record of a request in flight: of its attempt, which waits for a replica or was placed on one.

    Attributes:
        request: The attempt while it waits; None once it is placed, since its replica has it.
        since: Instant since when it has waited, or when it was placed.
        replica: Where it was placed, and on which worker life; empty while it waits.
        choice: Why it was placed there; None if it waits or an earlier Router placed it.
        waited_s: Seconds that it waited for a replica that takes requests.
        known_len: Tokens of its prompt, and of its output in earlier attempts.
        expected_len: Output tokens predicted beyond these, at most ``most_len``.
        variance: Variance of ``expected_len``, in tokens squared.
        has_target: Whether its client has set a latency target or a deadline.
        work_tokens: Its part of ``ReplicaLoad.work_tokens``.
        moved: Why it was recalled from where it was before; None if it was not.
        asked_at: Instant when its replica was last asked to give it back.
    """

    attempt: int
    ingress_id: str
    request: Request | None = None
    since: float = 0.0
    replica: str = ""
    worker_incarnation: str = ""
    choice: Choice | None = None
    waited_s: float = 0.0
    known_len: float = 0.0
    expected_len: float = 0.0
    most_len: float = 0.0
    variance: float = 0.0
    has_target: bool = False
    work_tokens: float = 0.0
    moved: Moved | None = None
    asked_at: float = -math.inf

    def is_recalled(self, now: float) -> bool:
        """Returns whether its replica may have given it back, and the answer is on its way."""
        return now - self.asked_at < ANSWER_S

    @property
    def hit_len(self) -> int:
        return 0 if self.choice is None else self.choice.hit_len


@dataclass(slots=True)
class PlacedDemand:
    """The part of ``Demand`` that the requests on one replica make, or those that wait."""

    known_tokens: float = 0.0
    cached_tokens: float = 0.0
    output_tokens: float = 0.0
    output_variance: float = 0.0
    num_with_targets: int = 0

    def add(self, entry: Entry, sign: int) -> None:
        self.known_tokens += sign * entry.known_len
        self.cached_tokens += sign * entry.hit_len
        self.output_tokens += sign * entry.expected_len
        self.output_variance += sign * entry.variance
        self.num_with_targets += sign * entry.has_target


@dataclass(slots=True)
class FleetReplica:
    """A replica and what is in flight on it.

    Attributes:
        ready: Its latest worker life; None before the first.
        up: Whether it takes requests now.
        draining: Whether no new request may be placed on it.
        requests: What is placed on it, by id.
        waiting: What of that was placed by this Router and has not run yet, in the order of placement.
        demand: What its requests ask for.
        sums: The attempts on it, as its Scheduler should have them.
    """

    load: ReplicaLoad
    ready: WorkerReady | None = None
    up: bool = False
    draining: bool = False
    requests: dict[str, Entry] = field(default_factory=dict)
    waiting: dict[str, Entry] = field(default_factory=dict)
    demand: PlacedDemand = field(default_factory=PlacedDemand)
    sums: KeySums = field(default_factory=KeySums)

    @property
    def is_external(self) -> bool:
        return self.ready is not None and self.ready.external

    @property
    def name(self) -> str:
        return self.load.name

    @property
    def takes(self) -> bool:
        """Whether requests may be placed on the replica."""
        return self.up and not self.draining

    def enter(self, request_id: str, entry: Entry) -> None:
        self.requests[request_id] = entry
        if entry.choice is not None:
            self.waiting[request_id] = entry
        self.sums.put(request_id, entry.attempt)
        self.demand.add(entry, 1)
        self._weigh(entry.work_tokens)

    def remove(self, request_id: str) -> None:
        entry = self.requests.pop(request_id)
        self.waiting.pop(request_id, None)
        self.sums.discard(request_id)
        self.demand.add(entry, -1)
        self._weigh(-entry.work_tokens)
        if not self.requests:
            self.demand = PlacedDemand()  # sums of fractions leave rounding errors

    def _weigh(self, more_tokens: float) -> None:
        self.load.num_requests = len(self.requests)
        # An empty replica has exactly no work: a sum of fractions would leave a rounding error, often below 0.
        self.load.work_tokens = self.load.work_tokens + more_tokens if self.requests else 0.0

    @property
    def capacity_tokens(self) -> int:
        return 0 if self.ready is None else self.ready.num_blocks * self.ready.block_size

    def view(self) -> ReplicaView:
        load, capacity = self.load, self.capacity_tokens
        return ReplicaView(self.name, self.takes, load.num_requests, load.work_tokens, capacity_tokens=capacity)

    def crowd(self, *, lists: bool) -> Crowd:
        """Returns the replica as the rules of moves see it; ``lists``: with what waits there, in O(waiting)."""
        demand, version = self.demand, -1 if self.ready is None else self.ready.model_version
        waiting = [
            WaitingRequest(
                (request_id, each.attempt),
                each.since,
                each.known_len + each.expected_len,
                each.hit_len,
                0 if each.moved is None else each.moved.num,
                each.asked_at,
            )
            for request_id, each in (self.waiting.items() if lists else ())
        ]
        tokens = demand.known_tokens + demand.output_tokens
        counts = (len(self.requests), tokens, self.capacity_tokens)
        return Crowd(self.name, version, self.takes, self.draining, *counts, bool(self.waiting), waiting)

    def fits(self, request: Request) -> bool:
        """Returns whether the replica runs the request's weights and can hold the request at its longest."""
        return self.runs(request) and self.holds(request)

    def runs(self, request: Request) -> bool:
        """Returns whether the replica runs the request's weights; those of an external server are not checked."""
        ready = self.ready
        return ready is not None and (ready.external or ready.model_version == request.model_version)

    def holds(self, request: Request) -> bool:
        """Returns whether the replica's worker can hold the request at its longest."""
        if self.ready is None or (self.ready.external and request.own_engine_field):
            return False
        return request.max_total_len <= self.ready.max_model_len
