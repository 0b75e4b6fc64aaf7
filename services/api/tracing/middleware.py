"""Opens a span when a request for an answer comes in, and hands it to the exporter when the answer has been sent."""

from __future__ import annotations

import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.answers.trace_context import TRACED, TracedAnswer, new_context
from services.api.tracing.exporter import SpanExporter
from services.api.tracing.spans import EndedAnswer

PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"})
"""Addresses whose requests get spans."""


class Tracing:
    """Adds nothing to requests that are not sampled."""

    def __init__(self, app: ASGIApp, exporter: SpanExporter) -> None:
        self._app = app
        self._exporter = exporter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        context = new_context(Headers(scope=scope).get("traceparent", ""), self._exporter.config.sample)
        if context is None:
            await self._app(scope, receive, send)
            return
        answer, status, began_ns = TracedAnswer(context), 0, time.time_ns()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = TRACED.set(answer)
        try:
            await self._app(scope, receive, watch)
        finally:
            TRACED.reset(token)
            ended = EndedAnswer(context, scope["path"], status, began_ns, time.time_ns(), answer.generation)
            self._exporter.add(ended)
