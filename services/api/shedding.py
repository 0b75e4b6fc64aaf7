"""Refuses requests before anything reads them, while the service can take none."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from core.errors import CapacityError
from services.api.errors import as_api_error
from services.api.middleware import drop_body
from services.api.readiness import Readiness

_GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")


def begins_generation(scope: Scope) -> bool:
    """Whether the request asks for tokens."""
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in _GENERATION_PATHS


class Shed:
    """Answers a request for tokens with 429 where it would be refused whatever it holds.

    A service that is offered several times what it can do spends its time on refusals: such a request is neither parsed
    nor tokenised, and waits for no turn. Who may come in has been asked before.

    Args:
        reason: Why it is refused, counting it; None if it may be admitted.
        max_body_bytes: Limit of a body; what is read and dropped is bounded by it.
    """

    def __init__(
        self, app: ASGIApp, reason: Callable[[], CapacityError | None], readiness: Readiness, max_body_bytes: int
    ) -> None:
        self._app = app
        self._reason = reason
        self._readiness = readiness
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._reason() if begins_generation(scope) and not self._readiness.is_draining else None
        if error is None:
            await self._app(scope, receive, send)
            return
        await drop_body(receive, self._max_body_bytes)
        await as_api_error(error).response()(scope, receive, send)
