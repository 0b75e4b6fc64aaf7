"""Streamed answers: server-sent events that begin with the first token and end with ``[DONE]``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.api.answers.chunk_writer import ChunkWriter, event
from services.api.answers.replies import usage
from services.api.backend import GenerationBackend
from services.api.errors import as_api_error
from services.api.generate import ClientGone, first_cached_len, run_jobs, while_connected
from services.api.jobs import Generation

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def chunks(
    backend: GenerationBackend, generation: Generation, writer: ChunkWriter
) -> AsyncGenerator[bytes, None]:
    """The events of one answer.

    Raises:
        Exception: The error that refuses the request before the first event. A later failure becomes an event.
    """
    started = False
    num_tokens = num_cached = 0
    try:
        async with aclosing(run_jobs(backend, generation)) as deltas:
            async for index, delta in deltas:
                num_tokens += delta.num_tokens
                if delta.cached_len and index % generation.num_tries == 0:
                    num_cached += first_cached_len(delta)
                chunk = writer.output(index, delta)
                if not started:
                    chunk = writer.opening() + chunk
                if chunk:
                    started = True
                    yield chunk
        tail = writer.usage(usage(generation, num_tokens, num_cached))
    except Exception as error:
        if not started:
            raise
        tail = event(as_api_error(error).body())
    yield tail + DONE


class EventStream(Response):
    """Sends events as they arrive. The status line waits for the first event; a disconnect ends the source."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await while_connected(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await _send_body(send, first, more=True)
            async for chunk in events:
                await _send_body(send, chunk, more=True)
                # A fast source and a server that never blocks would starve the disconnect watch.
                await asyncio.sleep(0)
            await _send_body(send, b"", more=False)


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    """Ignores the exception by which some servers report a disconnected client; it is no failure of ours."""
    try:
        await send({"type": "http.response.body", "body": body, "more_body": more})
    except OSError as error:
        raise ClientGone from error
