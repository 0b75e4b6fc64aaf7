"""A server on a real socket that streams, fails, stalls or closes early, as each request's ``user`` field says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

TOKENS_PER_CHUNK = 2
TOKENS_PER_WORD = 4
LONG_S = 240.0
"""For what a busy machine may delay."""


BROKEN = {
    "error": b'data: {"error": {"message": "out of memory"}}\n\n',
    "garbage": b'data: {"choices": [{"finish_reason": "length"\n\n',
}


class FakeServer:
    """Keeps the bodies that it was sent.

    Attributes:
        base_url: Address of the running server.
        bodies: In the order in which they came.
        most_open: So many requests were under way at once.
        wait_open: No request is answered before so many have been under way at once.
        max_model_len: Listed with the model, and longer requests are refused; 0: neither. A word takes four tokens.
        num_read: If given, says how many chunks of the one answer under way its client has read: the next one waits for
            all before it.
    """

    def __init__(self) -> None:
        self.base_url = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.begin()
        self._num_open = 0

    def begin(self) -> None:
        """As if no request had come yet."""
        self.bodies.clear()
        self.headers.clear()
        self.most_open = 0
        self.wait_open = 0
        self.max_model_len = 0
        self.num_read: Callable[[], int] | None = None

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        length = {"max_model_len": self.max_model_len} if self.max_model_len else {}
        return web.json_response({"data": [{"id": "fake", **length}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(body := await request.json())
        self.headers.append(dict(request.headers))
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        try:
            await _until(lambda: self.most_open >= self.wait_open)
            return await self._answer(request, body)
        finally:
            self._num_open -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.max_model_len:
            num_prompt = TOKENS_PER_WORD * len(body["prompt"].split())
            if num_prompt + body["max_tokens"] > self.max_model_len:
                return web.json_response({"error": {"message": "too long"}}, status=400)
            if not body["stream"]:
                return web.json_response({"usage": {"prompt_tokens": num_prompt}})
        fault = body.get("user")
        if fault == "full":
            return web.json_response({"error": {"message": "full"}}, status=503)
        if not body["stream"]:
            choice = {"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"}
            return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        num_tokens = body.get("benchmark_len", body["max_tokens"]) - (1 if fault == "short" else 0)
        stops = "ignore_eos" not in body and body.get("seed", 1) % 2 == 0  # every other answer ends by itself
        num_tokens = TOKENS_PER_CHUNK if stops else num_tokens
        for start in range(0, num_tokens, TOKENS_PER_CHUNK):
            reason = ("stop" if stops else "length") if start + TOKENS_PER_CHUNK >= num_tokens else None
            choice = {"index": 0, "text": "ab", "finish_reason": reason}
            await response.write(_event({"choices": [choice], "usage": None}))
            num_written, num_read = start // TOKENS_PER_CHUNK + 1, self.num_read
            if num_read is not None:
                await _until(lambda: num_read() >= num_written)  # noqa: B023 (awaited at once)
            await asyncio.sleep(0.002)
            if fault == "close" and start:
                assert request.transport is not None
                request.transport.close()
                return response
            if fault == "stall" and start:
                await asyncio.sleep(10 * LONG_S)
            if fault in BROKEN and start:
                await response.write(BROKEN[fault])
                return response
        if "stream_options" in body:
            usage = {"prompt_tokens": 3, "completion_tokens": num_tokens}
            await response.write(_event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 (another thread makes it true)
        await asyncio.sleep(0.001)


def _event(fields: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Runs it in a thread, on an event loop of its own."""
    server, ready, stop = FakeServer(), threading.Event(), threading.Event()

    async def serve() -> None:
        runner = web.AppRunner(server.app(), shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        while not stop.is_set():  # noqa: ASYNC110 (set by another thread)
            await asyncio.sleep(0.01)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="fake-server")
    thread.start()
    try:
        assert ready.wait(LONG_S)
        yield server
    finally:
        stop.set()
        thread.join(LONG_S)
        assert not thread.is_alive()
