"""Opens a span when a request for an answer comes in, and hands it over when the answer has been sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farsight.services.api.answers.served import TRACED
from farsight.services.api.readiness import TOKEN_PATHS

if TYPE_CHECKING:
    from farsight.services.api.tracing.exporter import SpanExporter


class Tracing:
    """Adds nothing to requests that ask for no tokens, or are not sampled."""

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
