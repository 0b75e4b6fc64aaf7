"""Spans of requests for answers, and the access log: one line a request, without header, query, prompt or answer."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farsight.services.api.answers.served import SERVED, TRACED, ServedRequest
from farsight.services.api.readiness import TOKEN_PATHS

if TYPE_CHECKING:
    from farsight.services.api.tracing.exporter import SpanExporter

MAX_PATH = 200
"""Characters of a path that are shown."""

logger = logging.getLogger("farsight.services.api.tracing.access_log")  # a name that readers of logs filter by


class Tracing:
    """Opens a span when such a request comes in, and hands it over when its answer has been sent.

    Adds nothing to requests that ask for no tokens, or are not sampled.
    """

    def __init__(self, app: ASGIApp, exporter: SpanExporter) -> None:
        self._app = app
        self._exporter = exporter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_traced = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in TOKEN_PATHS
        header = Headers(scope=scope).get("traceparent", "") if is_traced else ""
        answer = self._exporter.start(scope["path"], header) if is_traced else None
        if answer is None:
            await self._app(scope, receive, send)
            return

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
            await send(message)

        token = TRACED.set(answer)
        try:
            await self._app(scope, receive, watch)
        finally:
            TRACED.reset(token)
            self._exporter.finish(answer)


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
