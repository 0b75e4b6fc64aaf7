"""Requests on their way: ingress -> Router -> Scheduler, the answers about them, and the load that delays them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from farsight.core.costs import StepCost
from farsight.core.request import Request

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
    """Ingress -> Router, every half second and after a fault: what tells both whether they know the same open streams.

    Attributes:
        sums: The sums of all open streams that were sent, as ``KeySums`` packs them.
        listed: The parts of them that the Router asked for.
        open: All open streams of these parts, so that a new Router knows them.
        load: Requests in flight there, also the ones not sent yet.
    """

    ingress_id: str
    sums: bytes
    listed: tuple[int, ...] = ()
    open: tuple[OpenRequest, ...] = ()
    load: IngressLoad = IngressLoad()


@dataclass(frozen=True, slots=True)
class AnnounceReply:
    """Router -> ingress.

    Attributes:
        lost: Attempts that no worker runs any more; the ingress resumes them.
        refusals: Attempts that will never run.
        replicas: Every replica whose tokens may be for this ingress.
        placed: Attempts that were placed since the last reply, but by the answer to their ``Submit``.
        others: Requests in flight at all other ingress replicas.
        outlook: The load from which the queue delay is predicted.
        asked: Parts in which the Router knows other streams; the next announcement lists theirs.
    """

    lost: tuple[Key, ...]
    refusals: tuple[Refusal, ...]
    replicas: tuple[str, ...]
    placed: tuple[Placed, ...] = ()
    others: IngressLoad = IngressLoad()
    outlook: LoadSnapshot | None = None
    asked: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Promise:
    """A statement about the end of one attempt, made when the attempt reached its replica or while it was there.

    Attributes:
        p50_s: Seconds from the statement to the end, which half of the ends do not exceed.
        p90_s: Seconds that nine in ten ends do not exceed.
        coarse: The queue was too long to be rolled forward request by request.
    """

    request_id: str
    attempt: int
    p50_s: float
    p90_s: float
    coarse: bool = False


def last_end(promises: Iterable[Promise]) -> Promise | None:
    """Returns the promise of an answer of several requests: the latest end at each quantile; None without promises."""
    made = list(promises)
    if not made:
        return None
    last = max(made, key=lambda each: each.p90_s)
    p50_s = max(each.p50_s for each in made)
    return Promise(last.request_id, last.attempt, p50_s, last.p90_s, any(each.coarse for each in made))


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests that wait or are on our own engine; token counts are sums over them, as of each one's placement or
    arrival.

    Attributes:
        num_waiting: Requests that are on no replica yet.
        num_busy: Replicas that have requests.
        known_tokens: Tokens of prompts, and of outputs of earlier attempts.
        cached_tokens: Known tokens that are believed to be in the prefix cache of their replica.
        output_tokens: Predicted tokens that are still to come.
        output_variance: Variance of that sum by the laws of the lengths, in tokens squared.
        num_with_targets: Requests that have a deadline or an SLO, and so go before the others once they can wait no
            longer.
    """

    num_requests: int
    num_waiting: int
    num_busy: int
    known_tokens: float
    cached_tokens: float
    output_tokens: float
    output_variance: float = 0.0
    num_with_targets: int = 0

    def scaled(self, share: float) -> Demand:
        """Returns this share of the demand, 0 to 1: the same mixture on as many busy replicas."""
        return Demand(
            round(self.num_requests * share),
            round(self.num_waiting * share),
            self.num_busy,
            self.known_tokens * share,
            self.cached_tokens * share,
            self.output_tokens * share,
            self.output_variance * share,
            round(self.num_with_targets * share),
        )


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """From the Router: the demand, and the replicas that serve it.

    Attributes:
        num_replicas: Replicas that take requests now.
        max_num_seqs: Most requests that one of them runs at once.
        kv_tokens: KV tokens that the smallest of them holds; 0 if there is none.
        joins: Whether a request joins what runs (continuous batching), or waits for a replica that is idle.
        cost: Measured cost of a step; None before enough steps have been measured.
        lengths: Recent output lengths, at the levels of ``core.forecast.QUANTILES``; none before any has ended.
    """

    demand: Demand
    num_replicas: int
    max_num_seqs: int
    kv_tokens: int
    joins: bool
    cost: StepCost | None
    lengths: tuple[float, ...] = ()
