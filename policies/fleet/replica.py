"""A replica as the schedulers over replicas keep it."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.messages.placement import ReplicaView
from core.messages.plans import WorkerReady
from core.request import Request
from policies.placement.base import ReplicaLoad


@dataclass(slots=True)
class FleetReplica:
    """A replica and what is in flight on it.

    Attributes:
        ready: Its latest worker life; None before the first.
        up: Whether it takes requests now.
        draining: Nothing new is to be placed on it.
        requests: Tokens of work of each request that is placed on it, by id.
    """

    load: ReplicaLoad
    ready: WorkerReady | None = None
    up: bool = False
    draining: bool = False
    requests: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.load.name

    @property
    def takes(self) -> bool:
        """Whether requests may be placed on it."""
        return self.up and not self.draining

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
        load = self.load
        return ReplicaView(self.name, self.takes, load.num_requests, load.work_tokens, capacity_tokens=capacity)

    def fits(self, request: Request) -> bool:
        """Whether its worker holds the request when it is as long as it may get."""
        if self.ready is None or (self.ready.external and request.sampling.own_engine_field):
            return False
        return request.max_total_len <= self.ready.max_model_len
