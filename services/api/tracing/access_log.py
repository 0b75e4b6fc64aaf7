"""The access log: one line a request, with the id that the client's answer has; no header, query, prompt or answer."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farsight.services.api.answers.served import SERVED, ServedRequest

MAX_PATH = 200
"""Characters of a path that are shown."""

logger = logging.getLogger(__name__)


class AccessLog:
    """Logs each HTTP request when its answer has been sent, or the client has gone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        logger.setLevel(logging.INFO)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        served, status, began_s = ServedRequest(), 0, time.monotonic()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = SERVED.set(served)
        try:
            await self._app(scope, receive, watch)
        finally:
            SERVED.reset(token)
            _log(scope, status, time.monotonic() - began_s, served.response_id)


def _log(scope: Scope, status: int, took_s: float, request_id: str) -> None:
    fields: dict[str, str | float] = {
        "method": scope["method"],
        "path": scope["path"][:MAX_PATH],
        "status": status,
        "took_s": round(took_s, 6),
    }
    if request_id:
        fields["request_id"] = request_id
    logger.info("request", extra={"fields": fields})
