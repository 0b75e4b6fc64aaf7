"""Whether this process takes requests: what it knows of its Supervisor, of a drain and of its open requests.

A service that drains, or that is full, refuses before a body is read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from farsight.core.errors import CapacityError
from farsight.services.api.errors import ApiError, as_api_error, unhealthy
from farsight.services.api.middleware import drop_body

RETRY_AFTER_S = 1
"""A client that tries again after so many seconds may reach another server behind the same address."""

_GENERATION_PATHS = ("/v1/", "/api/")
_STREAM_PATHS = "/v1/streams/"
TOKEN_PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/api/generate",
)  # fmt: skip
"""Addresses whose requests ask for tokens."""

_REQUEST_LINES = tuple(f"POST {path} HTTP/".encode() for path in TOKEN_PATHS)

Reason = Callable[[], CapacityError | None]
"""Why a request for tokens that comes now is refused whatever it holds, counting it; None if it may be admitted."""


class Readiness:
    """What all requests of one process share about the end of their service. May be read by any thread.

    Args:
        silence_s: Without a word from the Supervisor for so long, the process counts as unsupervised.
        now: A monotonic clock in seconds.

    Attributes:
        is_draining: Whether new generations are refused.
        num_open: Requests to generate that have not been answered to their end.
    """

    def __init__(self, silence_s: float = math.inf, now: Callable[[], float] = time.monotonic) -> None:
        self._silence_s = silence_s
        self._now = now
        self._heard_at = now()
        self.is_draining = False
        self.num_open = 0

    def heard_supervisor(self) -> None:
        """Notes that the Supervisor has answered."""
        self._heard_at = self._now()

    @property
    def is_supervised(self) -> bool:
        """Whether the Supervisor has answered of late."""
        return self._now() - self._heard_at < self._silence_s

    def problem(self, *, healthy: bool) -> ApiError | None:
        """Says why the process is not ready; None if it is.

        Args:
            healthy: What ``/health`` says without the Supervisor.
        """
        if self.is_draining:
            return draining()
        return None if healthy and self.is_supervised else unhealthy()


def draining() -> ApiError:
    """Returns the response to requests that come too late."""
    message = "The server is stopping and takes no new requests. The request may be sent again."
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(message, status=503, code="draining", headers=headers)


class DrainGate:
    """Refuses generations while the service drains, and counts those that are open.

    A resumed stream is a generation that has begun: it is counted, and not refused.
    """

    def __init__(self, app: ASGIApp, readiness: Readiness) -> None:
        self._app = app
        self._readiness = readiness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begins = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(_GENERATION_PATHS)
        if not begins and not (scope["type"] == "http" and scope["path"].startswith(_STREAM_PATHS)):
            await self._app(scope, receive, send)
            return
        if begins and self._readiness.is_draining:
            await draining().response()(scope, receive, send)
            return
        self._readiness.num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._readiness.num_open -= 1


def asks_for_tokens(data: bytes) -> bool:
    """Tells from the first bytes of a request, as sent, whether it asks for tokens; False if they are too few."""
    return data.startswith(_REQUEST_LINES)


class Refused:
    """The application for a connection whose request is refused before it is parsed; others pass.

    Args:
        max_body_bytes: Limit of a body; what is read and dropped is bounded by it.
    """

    def __init__(self, app: ASGIApp, error: CapacityError, max_body_bytes: int) -> None:
        self._app = app
        self._error = error
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _begins_generation(scope):
            await self._app(scope, receive, send)
            return
        error = as_api_error(self._error)
        if not await drop_body(receive, self._max_body_bytes):
            error.headers["Connection"] = "close"
        await error.response()(scope, receive, send)


class Shed:
    """The layer of the application that refuses; who may come in has been asked before.

    Args:
        max_body_bytes: As for ``Refused``.
    """

    def __init__(self, app: ASGIApp, reason: Reason, readiness: Readiness, max_body_bytes: int) -> None:
        self._app = app
        self._reason = reason
        self._readiness = readiness
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._reason() if _begins_generation(scope) and not self._readiness.is_draining else None
        app = self._app if error is None else Refused(self._app, error, self._max_body_bytes)
        await app(scope, receive, send)


def _begins_generation(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in TOKEN_PATHS
