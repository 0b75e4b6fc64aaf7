"""What the scheduler of another server hears, and what it answers, beside what every replica's scheduler does."""

from __future__ import annotations

from dataclasses import dataclass

from core.messages.requests import Key
from core.request import Request, SequenceStatus
from policies.replica.events import (
    AccountClosed,
    ForecastsArrived,
    RefuseRequest,
    RequestEnded,
    RequestsAborted,
    RequestsArrived,
    RequestStarted,
)

FAILURE_KINDS = ("connect", "timeout", "busy", "http", "broken", "protocol", "model", "auth", "request")
"""No connection; too slow; full; another error status; broke off in its answer; not understood; another model than it
should serve; our key refused; a request refused that others would be answered to."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the other server did not do what it should.

    Attributes:
        kind: For counting: one of ``FAILURE_KINDS``.
        message: For people.
        trips: It would go on failing: nothing more goes there until a probe passes.
        of_request: The server is well; this request it does not take.
    """

    kind: str
    message: str
    trips: bool = False
    of_request: bool = False


@dataclass(frozen=True, slots=True)
class ProbeDone:
    """
    Attributes:
        failure: None if it passed.
        max_model_len: Tokens that a sequence may reach there, if it passed.
    """

    failure: Failure | None
    max_model_len: int = 0


@dataclass(frozen=True, slots=True)
class OutputGrew:
    """So many tokens more have come; the first ones among them, or not."""

    key: Key
    num_tokens: int


@dataclass(frozen=True, slots=True)
class OutputEnded:
    """The server has said how it ended.

    Attributes:
        cached_len: Prompt tokens that it says it had cached; None if it does not say.
    """

    key: Key
    status: SequenceStatus
    cached_len: int | None = None


@dataclass(frozen=True, slots=True)
class OutputFailed:
    """It has not: the request ended otherwise, or never began."""

    key: Key
    failure: Failure


@dataclass(frozen=True, slots=True)
class ProbeTick:
    """Nothing has happened, but time."""


BackendEvent = (
    RequestsArrived
    | RequestsAborted
    | ForecastsArrived
    | ProbeDone
    | OutputGrew
    | OutputEnded
    | OutputFailed
    | ProbeTick
)


@dataclass(frozen=True, slots=True)
class SendRequest:
    """This goes to the server now."""

    request: Request


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """No client waits for this attempt any more: the server must stop it."""

    key: Key


@dataclass(frozen=True, slots=True)
class ReturnRequest:
    """Without a token so far: its ingress replica is to have it placed again."""

    request: Request
    reason: str


@dataclass(frozen=True, slots=True)
class FailRequest:
    """The attempt has failed: its client already has tokens, so no other server can continue it.

    Attributes:
        output_len: Tokens that it has got.
    """

    request: Request
    output_len: int
    reason: str


@dataclass(frozen=True, slots=True)
class AskServer:
    """A probe is due.

    Attributes:
        generates: Whether it is to have a token made as well: then it decides whether requests go there.
    """

    generates: bool


@dataclass(frozen=True, slots=True)
class BreakerChanged:
    """Requests go there from now on, or no more."""


BackendInstruction = (
    SendRequest
    | CancelRequest
    | ReturnRequest
    | FailRequest
    | AskServer
    | BreakerChanged
    | RefuseRequest
    | RequestStarted
    | RequestEnded
    | AccountClosed
)
