"""Requests on their way: ingress -> Router -> Scheduler, and the answers about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from core.load_snapshot import LoadSnapshot
from core.promise import Promise
from core.request import Request

Key = tuple[str, int]
"""(request id, attempt)."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Ingress -> Router -> Scheduler: requests, new or resumed, in order of arrival.

    Attributes:
        placements: Router -> Scheduler: why each of them is there (``core.decisions``, packed, on a clock that is
            named). The Scheduler adds them to its decision trace and decides nothing by them.
    """

    requests: tuple[Request, ...]
    placements: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of attempts whose clients are gone (``abort``), or that the Scheduler is asked about or lacks."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Scheduler -> Router -> ingress, in answer to ``Submit``: this request will never run."""

    request_id: str
    attempt: int
    field: str
    message: str


@dataclass(frozen=True, slots=True)
class Refusals:
    """Scheduler -> Router, in answer to ``Submit``: the refused requests, and when the accepted ones will end."""

    refusals: tuple[Refusal, ...]
    promises: tuple[Promise, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """Router -> ingress: an attempt and the worker life that runs it; an empty replica while it waits for one."""

    request_id: str
    attempt: int
    replica: str
    worker_incarnation: str


@dataclass(frozen=True, slots=True)
class SubmitReply:
    placed: tuple[Placed, ...]
    refusals: tuple[Refusal, ...]
    promises: tuple[Promise, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """An open stream as its ingress replica knows it; ``work_tokens`` is the prompt plus all output that may come."""

    request_id: str
    attempt: int
    replica: str
    worker_incarnation: str
    work_tokens: int


@dataclass(frozen=True, slots=True)
class IngressLoad:
    """Requests in flight at ingress replicas.

    Attributes:
        by_key: (client's key, "" without one; requests; prompt tokens).
    """

    by_key: tuple[tuple[str, int, int], ...] = ()


def total_load(loads: Iterable[IngressLoad]) -> IngressLoad:
    """Adds the loads key by key."""
    requests: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for load in loads:
        for key, num_requests, prompt_tokens in load.by_key:
            requests[key] += num_requests
            tokens[key] += prompt_tokens
    return IngressLoad(tuple((key, requests[key], tokens[key]) for key in requests))


@dataclass(frozen=True, slots=True)
class Announce:
    """Ingress -> Router, every half second and after a fault: all its open streams, so that a new Router knows them.

    Attributes:
        load: Requests in flight there, also the ones not sent yet.
    """

    ingress_id: str
    open: tuple[OpenRequest, ...]
    load: IngressLoad = IngressLoad()


@dataclass(frozen=True, slots=True)
class AnnounceReply:
    """Router -> ingress.

    Attributes:
        lost: Attempts that no worker runs any more; the ingress resumes them.
        refusals: Attempts that will never run.
        replicas: Every replica whose tokens may be for this ingress.
        placed: Attempts that no longer wait, as far as the ingress did not know.
        others: Requests in flight at all other ingress replicas.
        outlook: The load from which the queue delay is predicted.
    """

    lost: tuple[Key, ...]
    refusals: tuple[Refusal, ...]
    replicas: tuple[str, ...]
    placed: tuple[Placed, ...] = ()
    others: IngressLoad = IngressLoad()
    outlook: LoadSnapshot | None = None
