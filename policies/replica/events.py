"""Events that a replica's scheduler handles, and instructions with which it answers."""

from __future__ import annotations

from dataclasses import dataclass

from farsight.core.costs import StepCost
from farsight.core.decisions import on_clock
from farsight.core.forecast import Forecast, ForecastMade
from farsight.core.messages.kv import OffloadOrders, OffloadQuestion
from farsight.core.messages.log import RequestTrace
from farsight.core.messages.plans import (
    FinishedSequence,
    KVCacheEvent,
    Plan,
    StartedRequest,
    StepReport,
    TenantService,
    WorkerState,
)
from farsight.core.messages.requests import Key, Promise
from farsight.core.request import Origin, Request


@dataclass(frozen=True, slots=True)
class WorkerConnected:
    """A worker has granted a lease: a new one that holds nothing, or one that outlived another Scheduler."""

    state: WorkerState


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker is gone, with all requests shipped to it; their ingress replicas resume these elsewhere."""


@dataclass(frozen=True, slots=True)
class RequestsArrived:
    """
    Attributes:
        placements: As in ``Submit``.
    """

    requests: tuple[Request, ...]
    placements: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestsAborted:
    """The clients of these (request id, attempt) pairs are gone."""

    keys: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class RequestsRecalled:
    """These attempts are to be given back, if no plan has named them yet."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class WorkerReported:
    report: StepReport


@dataclass(frozen=True, slots=True)
class StepsRan:
    """Each request has decoded ``num_steps`` tokens in ``duration_s`` seconds since the scheduler last heard of it.

    The short form of a report in which nothing else has changed; a later report says the same again.

    Attributes:
        services: As in ``StepReport``, with these steps.
    """

    request_ids: tuple[str, ...]
    num_steps: int
    duration_s: float
    services: tuple[TenantService, ...] = ()


@dataclass(frozen=True, slots=True)
class ForecastsArrived:
    """Forecasts of requests that came without one; requests that have left are ignored."""

    made: tuple[ForecastMade, ...]


@dataclass(frozen=True, slots=True)
class CostLearned:
    """What steps cost on this replica, as measured by now."""

    cost: StepCost


@dataclass(frozen=True, slots=True)
class OffloadOrdered:
    """The KVOffloadManager has answered."""

    orders: OffloadOrders


@dataclass(frozen=True, slots=True)
class OffloadUnanswered:
    """The answer to a question is late or, if ``lost``, will not come."""

    seq: int
    lost: bool = False


@dataclass(frozen=True, slots=True)
class PromisesAsked:
    """When will these requests, which have just come, end? An event, since the answer is noted in their accounts."""

    request_ids: tuple[str, ...]


Event = (
    WorkerConnected
    | WorkerLost
    | RequestsArrived
    | RequestsAborted
    | RequestsRecalled
    | WorkerReported
    | CostLearned
    | ForecastsArrived
    | StepsRan
    | OffloadOrdered
    | OffloadUnanswered
    | PromisesAsked
)


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Send this plan to the worker; a newer plan supersedes it."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class AskOffload:
    """Ask the KVOffloadManager. ``OffloadOrdered`` brings the answer; ``OffloadUnanswered`` comes if there is none by
    the deadline. Plans go on meanwhile; plans before the answer move no KV."""

    question: OffloadQuestion


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """Tell the ingress that this request will never run."""

    request_id: str
    attempt: int
    field: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """A request has run for the first time; sent once, before its end."""

    started: StartedRequest


@dataclass(frozen=True, slots=True)
class CacheTold:
    """News of the worker's prefix cache; sent once, in order, and before the ends of the requests that filled it."""

    notice: KVCacheEvent


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request reached its end in the worker; sent once.

    Attributes:
        forecast: The request's forecast, within its limit; None without one.
        first_token_at: When its first token was reported; None without one, and from another server.
    """

    finished: FinishedSequence
    arrived_at: float
    ended_at: float
    forecast: Forecast | None = None
    first_token_at: float | None = None


@dataclass(frozen=True, slots=True)
class BatchBroken:
    """A batch ran out of memory: these requests, all that were here, are forgotten and must run in smaller batches."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class AccountClosed:
    """All decisions about a request that has left, for a journal."""

    request_id: str
    attempt: int
    origin: Origin
    placement: bytes
    decisions: bytes
    num_left_out: int
    tenant: str = ""
    prompt_len: int = 0


@dataclass(frozen=True, slots=True)
class RequestGivenBack:
    """A request that no plan has named is no longer here; its account goes with it, if it has one."""

    request: Request
    account: AccountClosed | None


@dataclass(frozen=True, slots=True)
class PromisesMade:
    """The answer to ``PromisesAsked``; empty before steps have been measured."""

    promises: tuple[Promise, ...]


Instruction = (
    SendPlan
    | AskOffload
    | RefuseRequest
    | RequestStarted
    | CacheTold
    | RequestEnded
    | BatchBroken
    | AccountClosed
    | RequestGivenBack
    | PromisesMade
)


def request_trace(account: AccountClosed, source: str, epoch_s: float, *, ended: bool) -> RequestTrace:
    """Makes the log record of an account.

    Args:
        epoch_s: Seconds since the epoch at which the clock of the decisions stood at 0.
    """
    origin = account.origin
    return RequestTrace(
        trace_id=f"{origin.response_id}/{account.request_id}/{account.attempt}",
        request_id=account.request_id,
        choice=origin.choice,
        owner=origin.owner,
        source=source,
        attempt=account.attempt,
        ended=ended,
        num_left_out=account.num_left_out,
        decisions=account.placement + on_clock(epoch_s, account.decisions),
    )
