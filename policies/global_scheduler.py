"""The scheduler over replicas (``Router``): a state machine, ``handle(event, now) -> [Instruction]``.

It decides which replica runs a request and remembers it until the request ends. What a replica does with its
requests is the ``ReplicaScheduler``'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import IntegrityError
from core.request import Request
from policies.placement import Placement, ReplicaLoad
from policies.replica_scheduler import RefuseRequest, RequestsAborted, RequestsArrived

HISTORY_WEIGHT = 1 / 64
"""How much one ended request moves the mean output length that work is estimated with."""


@dataclass(frozen=True, slots=True)
class ReplicaConnected:
    """A replica can take requests from now on."""

    name: str


@dataclass(frozen=True, slots=True)
class RequestLeft:
    """A replica is done with a request; ``output_len`` is None if it never ran."""

    request_id: str
    attempt: int
    output_len: int | None


GlobalEvent = ReplicaConnected | RequestsArrived | RequestsAborted | RequestLeft


@dataclass(frozen=True, slots=True)
class PlaceRequests:
    """These go to this replica, in this order."""

    replica: str
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class AbortOnReplica:
    """Their replica must forget these (request id, attempt) pairs."""

    replica: str
    keys: tuple[tuple[str, int], ...]


GlobalInstruction = PlaceRequests | AbortOnReplica | RefuseRequest


@dataclass(slots=True)
class _Replica:
    name: str
    requests: dict[str, float]  # id -> tokens of work
    work_tokens: float = 0.0

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(self.name, len(self.requests), self.work_tokens)


@dataclass(frozen=True, slots=True)
class _Placed:
    attempt: int
    replica: str


class GlobalScheduler:
    """Places requests on replicas and keeps the in-flight table."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._replicas: dict[str, _Replica] = {}
        self._placed: dict[str, _Placed] = {}
        self._mean_output_len: float | None = None

    @property
    def num_in_flight(self) -> int:
        return len(self._placed)

    def loads(self) -> list[ReplicaLoad]:
        """Every replica, in order of connection."""
        return [replica.load() for replica in self._replicas.values()]

    def handle(self, event: GlobalEvent, now: float) -> list[GlobalInstruction]:
        """The only mutator. ``now`` is seconds on the caller's monotonic clock."""
        match event:
            case RequestsArrived():
                return self._arrive(event.requests)
            case RequestsAborted():
                return self._abort(event.keys)
            case RequestLeft():
                self._end(event)
            case ReplicaConnected():
                self._replicas.setdefault(event.name, _Replica(event.name, {}))
        return []

    def _arrive(self, requests: tuple[Request, ...]) -> list[GlobalInstruction]:
        if not self._replicas:
            return [RefuseRequest(r.request_id, r.attempt, "model", "no replica is ready yet") for r in requests]
        placed: dict[str, list[Request]] = {}
        for request in requests:
            known = self._placed.get(request.request_id)
            if known is not None and known.attempt >= request.attempt:
                continue  # a duplicate delivery
            if known is not None:
                self._remove(request.request_id)
            placed.setdefault(self._place(request), []).append(request)
        return [PlaceRequests(name, tuple(group)) for name, group in placed.items()]

    def _place(self, request: Request) -> str:
        name = self._placement.choose(request, self.loads())
        replica = self._replicas[name]
        replica.requests[request.request_id] = self._work(request)
        replica.work_tokens += replica.requests[request.request_id]
        self._placed[request.request_id] = _Placed(request.attempt, name)
        return name

    def _work(self, request: Request) -> float:
        """Prompt plus the mean output so far, at most what was asked for."""
        most = float(request.sampling.max_new_tokens)
        expected = most if self._mean_output_len is None else min(most, self._mean_output_len)
        return request.prompt_len + expected

    def _abort(self, keys: tuple[tuple[str, int], ...]) -> list[GlobalInstruction]:
        by_replica: dict[str, list[tuple[str, int]]] = {}
        for request_id, attempt in keys:
            placed = self._placed.get(request_id)
            if placed is not None and placed.attempt <= attempt:
                by_replica.setdefault(placed.replica, []).append((request_id, attempt))
                self._remove(request_id)
        return [AbortOnReplica(name, tuple(group)) for name, group in by_replica.items()]

    def _end(self, event: RequestLeft) -> None:
        placed = self._placed.get(event.request_id)
        if placed is None or placed.attempt != event.attempt:
            return
        self._remove(event.request_id)
        if event.output_len is not None:
            self._learn(event.output_len)

    def _learn(self, output_len: int) -> None:
        mean = self._mean_output_len
        self._mean_output_len = output_len if mean is None else mean + HISTORY_WEIGHT * (output_len - mean)

    def _remove(self, request_id: str) -> None:
        replica = self._replicas[self._placed.pop(request_id).replica]
        replica.work_tokens -= replica.requests.pop(request_id)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the table and the replicas' sums agree."""
        held = {request_id: replica.name for replica in self._replicas.values() for request_id in replica.requests}
        if held != {request_id: placed.replica for request_id, placed in self._placed.items()}:
            raise IntegrityError("the in-flight table and the replicas disagree")
        for replica in self._replicas.values():
            if abs(replica.work_tokens - sum(replica.requests.values())) > 1e-6 * max(1.0, replica.work_tokens):
                raise IntegrityError(f"{replica.name}: {replica.work_tokens} is not the sum of its work")
