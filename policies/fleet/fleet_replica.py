"""A replica as the table of requests knows it, and what is in flight on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from farsight.core.key_sums import KeySums
from farsight.core.messages.placement import ReplicaView
from farsight.core.messages.plans import WorkerReady
from farsight.core.request import Request
from farsight.policies.placement.base import Choice, ReplicaLoad


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the table: an attempt and the worker life that it was placed on.

    Attributes:
        choice: Why the request was placed there; None if an earlier Router placed it.
        waited_s: Seconds that the request waited for a replica that takes requests.
        known_len: Tokens of its prompt, and of its output in earlier attempts, when it was placed.
        expected_len: Output tokens predicted beyond these, at most ``most_len``.
        variance: Variance of ``expected_len``, in tokens squared.
        has_target: Whether its client has set a latency target or a deadline.
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
    variance: float = 0.0
    has_target: bool = False

    @property
    def hit_len(self) -> int:
        return 0 if self.choice is None else self.choice.hit_len


@dataclass(slots=True)
class PlacedDemand:
    """The part of ``Demand`` that the requests on one replica make."""

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
        requests: Tokens of work of each request that is placed on it, by id.
        demand: What its requests ask for.
        sums: The attempts on it, as its Scheduler should have them.
    """

    load: ReplicaLoad
    ready: WorkerReady | None = None
    up: bool = False
    draining: bool = False
    requests: dict[str, float] = field(default_factory=dict)
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

    def enter(self, request_id: str, entry: Entry, work_tokens: float) -> None:
        self.requests[request_id] = work_tokens
        self.sums.put(request_id, entry.attempt)
        self.demand.add(entry, 1)
        self._weigh(work_tokens)

    def remove(self, request_id: str, entry: Entry) -> None:
        self.sums.discard(request_id)
        self.demand.add(entry, -1)
        self._weigh(-self.requests.pop(request_id))
        if not self.requests:
            self.demand = PlacedDemand()  # sums of fractions leave rounding errors

    def _weigh(self, more_tokens: float) -> None:
        self.load.num_requests = len(self.requests)
        # An empty replica has exactly no work: a sum of fractions would leave a rounding error, often below 0.
        self.load.work_tokens = self.load.work_tokens + more_tokens if self.requests else 0.0

    def view(self) -> ReplicaView:
        capacity = 0 if self.ready is None else self.ready.num_blocks * self.ready.block_size
        load = self.load
        return ReplicaView(self.name, self.takes, load.num_requests, load.work_tokens, capacity_tokens=capacity)

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
