"""A ``GlobalScheduler`` for tests, and what it is told."""

from __future__ import annotations

from farsight.core.forecast import QUANTILES, Forecast
from farsight.core.key_sums import NUM_PARTS, KeySums
from farsight.core.messages.plans import FinishedSequence, WorkerReady
from farsight.core.messages.requests import Key, OpenRequest
from farsight.core.request import Request, SamplingParams, SequenceStatus
from farsight.policies.fleet.events import (
    GlobalEvent,
    GlobalInstruction,
    IngressAnnounced,
    PlaceRequests,
    ReplicaUp,
    RequestsEnded,
)
from farsight.policies.fleet.scheduler import GlobalScheduler
from farsight.policies.placement.base import LeastWork, Placement
from farsight.policies.replica.events import RequestsArrived

ALL_PARTS = tuple(range(NUM_PARTS))


def request(
    name: str, prompt: int = 10, out: int = 10, attempt: int = 0, ingress: str = "i", resumed: int = 0
) -> Request:
    return Request(name, attempt, ingress, (1,) * prompt, SamplingParams(out), (2,) * resumed)


def ready(incarnation: str = "w1", max_model_len: int = 5000) -> WorkerReady:
    return WorkerReady(incarnation, 100, 4, max_model_len, False, 100)


def forecast(mean: float) -> Forecast:
    return Forecast(mean, (mean,) * len(QUANTILES), 9, "test", 1)


def handle(scheduler: GlobalScheduler, event: GlobalEvent) -> list[GlobalInstruction]:
    instructions = scheduler.handle(event, 0.0)
    scheduler.check_integrity()
    return instructions


def router(placement: Placement | None = None, replicas: str = "ab") -> GlobalScheduler:
    scheduler = GlobalScheduler(placement or LeastWork())
    for name in replicas:
        handle(scheduler, ReplicaUp(name, ready()))
    return scheduler


def arrive(scheduler: GlobalScheduler, *requests: Request) -> dict[str, list[str]]:
    """{replica: ids placed there}"""
    return placements(handle(scheduler, RequestsArrived(requests)))


def placements(instructions: list[GlobalInstruction]) -> dict[str, list[str]]:
    placed: dict[str, list[str]] = {}
    for instruction in instructions:
        assert isinstance(instruction, PlaceRequests)
        placed[instruction.replica] = [each.request_id for each in instruction.requests]
    return placed


def end(scheduler: GlobalScheduler, name: str, attempt: int = 0) -> None:
    finished = FinishedSequence(name, attempt, SequenceStatus.FINISHED_STOPPED, 3)
    assert handle(scheduler, RequestsEnded((finished,))) == []


def stream(name: str, attempt: int = 0, replica: str = "a", incarnation: str = "w1", work: int = 20) -> OpenRequest:
    return OpenRequest(name, attempt, replica, incarnation, work)


def announce(scheduler: GlobalScheduler, *streams: OpenRequest, ingress: str = "i") -> list[GlobalInstruction]:
    return handle(scheduler, announcement(*streams, ingress=ingress))


def announcement(*streams: OpenRequest, ingress: str = "i") -> IngressAnnounced:
    """Says which streams are open as an ingress replica does that was asked for all of them."""
    return IngressAnnounced(ingress, sums(*((each.request_id, each.attempt) for each in streams)), ALL_PARTS, streams)


def sums(*keys: Key) -> bytes:
    """Sums of a set of attempts, packed."""
    made = KeySums()
    for key in keys:
        made.put(*key)
    return made.packed()
