"""Another server, as small as it gets: real HTTP, and misbehaviour on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MODEL = "m"


@dataclass
class OpenAIDouble:
    """An OpenAI-compatible server whose answers and faults a test sets.

    Attributes:
        texts: Text of each chunk of every completion; one token each.
        first_s, next_s: Seconds before the first chunk and before each later one; ``math.inf`` hangs.
        break_after: Chunks after which the connection breaks; None: it does not.
        status: HTTP status of completions.
        health: HTTP status of ``GET /health``.
        answers_as: What it says that its model is, where it answers ...
        models: ... and where it lists them.
        chats: Whether it has chats.
        usage: Beside ``completion_tokens``; None: it says nothing.
        open: Connections of completions under way.
        bodies: What has been asked for, without the probes of one token.
    """

    texts: tuple[str, ...] = ("one", " two", " three")
    first_s: float = 0.0
    next_s: float = 0.0
    break_after: int | None = None
    status: int = 200
    health: int = 200
    answers_as: str = MODEL
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": MODEL, "max_model_len": 1000}])
    finish_reason: str | None = "stop"
    usage: dict[str, Any] | None = field(default_factory=dict)
    chats: bool = False
    open: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    url: str = ""

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[OpenAIDouble]:
        """Listens meanwhile, on ``port`` or any."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        if self.chats:
            app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["max_tokens"] > 1:
            self.bodies.append(body)
        self.keys.add(request.headers.get("Authorization"))
        if self.status != 200:
            return web.json_response({"error": {"message": "as told"}}, status=self.status)
        self.open += 1
        try:
            return await self._stream(request, chat="messages" in body)
        finally:
            self.open -= 1

    async def _stream(self, request: web.Request, chat: bool) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        await _hang(self.first_s)
        for index, text in enumerate(self.texts):
            if index == self.break_after:
                assert request.transport is not None
                request.transport.abort()
                return reply
            if index:
                await _hang(self.next_s)
            said = {"delta": {"content": text}} if chat else {"text": text}
            await self._send(reply, {"choices": [{"index": 0, **said, "finish_reason": None}]})
        await self._send(reply, {"choices": [{"index": 0, "text": "", "finish_reason": self.finish_reason}]})
        if self.usage is not None:
            await self._send(reply, {"choices": [], "usage": {"completion_tokens": len(self.texts), **self.usage}})
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def _send(self, reply: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await reply.write(b"data: " + json.dumps({"model": self.answers_as, **chunk}).encode() + b"\n\n")


async def _hang(seconds: float) -> None:
    if seconds == float("inf"):
        await asyncio.Event().wait()
    await asyncio.sleep(seconds)
