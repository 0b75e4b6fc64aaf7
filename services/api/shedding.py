"""Refuses requests before anything reads them, while the service can take none.

A service that is offered several times what it can do spends its time on refusals: such a request is neither parsed nor
tokenised, and does not wait behind those that are.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from core.errors import CapacityError
from services.api.errors import as_api_error
from services.api.middleware import drop_body
from services.api.readiness import Readiness

Reason = Callable[[], CapacityError | None]
"""Why a request for tokens that comes now is refused whatever it holds, counting it; None if it may be admitted."""

_GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
_REQUEST_LINES = tuple(f"POST {path} HTTP/".encode() for path in _GENERATION_PATHS)


def asks_for_tokens(data: bytes) -> bool:
    """Whether the first bytes of a request, as they were sent, say that it asks for tokens; no if they are too few."""
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
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in _GENERATION_PATHS
