"""Whether this process may be sent requests: what it knows of its Supervisor, of a drain, and of its open requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from services.api.errors import SERVER_ERROR, ApiError, unhealthy

RETRY_AFTER_S = 1
"""A client that tries again after so many seconds may reach another server behind the same address."""

_GENERATION_PATHS = "/v1/"
_STREAM_PATHS = "/v1/streams/"


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
        """The Supervisor has answered."""
        self._heard_at = self._now()

    @property
    def is_supervised(self) -> bool:
        """Whether the Supervisor has answered of late."""
        return self._now() - self._heard_at < self._silence_s

    def problem(self, *, healthy: bool) -> ApiError | None:
        """Why the process is not ready; None if it is.

        Args:
            healthy: What ``/health`` says without the Supervisor.
        """
        if self.is_draining:
            return draining()
        return None if healthy and self.is_supervised else unhealthy()


def draining() -> ApiError:
    """The response to requests that come too late."""
    message = "The server is stopping and takes no new requests. The request may be sent again."
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(message, status=503, kind=SERVER_ERROR, code="draining", headers=headers)


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
