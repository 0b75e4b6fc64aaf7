"""Events and instructions of the scheduler of an external server, beyond those of every replica's scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from farsight.core.messages.requests import Key
from farsight.core.request import Request, SequenceStatus
from farsight.policies.replica.events import (
    AccountClosed,
    ForecastsArrived,
    RefuseRequest,
    RequestEnded,
    RequestsAborted,
    RequestsArrived,
    RequestStarted,
)

FAILURE_KINDS = ("connect", "timeout", "busy", "http", "broken", "protocol", "model", "auth", "request")
"""No connection; too slow; full; another error status; answer broken off; answer not understood; another model than
expected; our key refused; one request refused by a server that is otherwise well."""


@dataclass(frozen=True, slots=True)
class ServerFailure:
    """Why the external server did not do what it was asked.

    Attributes:
        kind: One of ``FAILURE_KINDS``, for counting.
        message: Text for people.
        trips: Every request would fail: no more are sent until a probe passes.
        of_request: The server is well; it only refuses this request.
    """

    kind: str
    message: str
    trips: bool = False
    of_request: bool = False


@dataclass(frozen=True, slots=True)
class ProbeDone:
    """
    Attributes:
        failure: None if the probe passed.
        max_model_len: Tokens that a sequence may reach on the server, if the probe passed.
    """

    failure: ServerFailure | None
    max_model_len: int = 0


@dataclass(frozen=True, slots=True)
class OutputGrew:
    """The server has sent ``num_tokens`` more tokens, whether its first ones or later ones."""

    key: Key
    num_tokens: int


@dataclass(frozen=True, slots=True)
class OutputEnded:
    """The output is complete.

    Attributes:
        cached_len: Prompt tokens that the server reports as cached; None if it does not report them.
    """

    key: Key
    status: SequenceStatus
    cached_len: int | None = None


@dataclass(frozen=True, slots=True)
class OutputFailed:
    """The output is incomplete, or never began."""

    key: Key
    failure: ServerFailure


@dataclass(frozen=True, slots=True)
class ProbeTick:
    """Only time has passed since the last event."""


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
    """Send this request to the server now."""

    request: Request


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Make the server stop this attempt: no client waits for it any more."""

    key: Key


@dataclass(frozen=True, slots=True)
class ReturnRequest:
    """Return this request, which has no token yet, to its ingress replica, which has it placed again."""

    request: Request
    reason: str


@dataclass(frozen=True, slots=True)
class FailRequest:
    """The attempt has failed: its client already has tokens, so no other server can continue it.

    Attributes:
        output_len: Tokens that the client has received.
    """

    request: Request
    output_len: int
    reason: str


@dataclass(frozen=True, slots=True)
class AskServer:
    """Probe the server.

    Attributes:
        generates: Whether the probe also makes the server generate a token; such a probe decides whether the breaker
            closes.
    """

    generates: bool


@dataclass(frozen=True, slots=True)
class BreakerChanged:
    """The breaker has opened or closed, or the server's limit of sequence length has changed."""


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
