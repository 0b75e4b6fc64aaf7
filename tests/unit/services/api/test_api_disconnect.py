"""A client that leaves early ends its streams; against a real HTTP server, since only that one tells."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import MODEL, ScriptedBackend, Step, delta, whole_app

LONG_S = 120.0
"""Only so that nothing hangs for ever."""

SILENT: list[Step] = [1e6]
TALKING: list[Step] = [delta("x"), 1e6]
BUSY: list[Step] = [*[delta("x" * 1000)] * 100_000, delta("", "stop")]


@asynccontextmanager
async def _serve(backend: ScriptedBackend, encoder: PromptEncoder) -> AsyncGenerator[int, None]:
    config = uvicorn.Config(whole_app(backend, encoder), host="127.0.0.1", port=0, log_level="warning", ws="none")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    await _until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110 - the thing waited for has no event
            await asyncio.sleep(0.005)


async def _send(port: int, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [SILENT, TALKING])
@pytest.mark.parametrize(
    ("path", "prompt", "num_streams"),
    [
        ("/v1/completions", {"prompt": "hello"}, 1),
        ("/v1/completions", {"prompt": ["hello"] * 5}, 5),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, 1),
    ],
)
async def test_leaving_closes_every_stream(
    encoder: PromptEncoder, path: str, prompt: dict[str, Any], num_streams: int, script: list[Step], stream: bool
) -> None:
    backend = ScriptedBackend(script)
    async with _serve(backend, encoder) as port:
        reader, writer = await _send(port, path, {"model": MODEL, "stream": stream, **prompt})
        await _until(lambda: backend.num_opened == num_streams)
        if stream and script is TALKING:
            assert b"200 OK" in await reader.readuntil(b"data: ")
        assert backend.num_closed == 0
        writer.close()
        await _until(lambda: backend.num_closed == num_streams)
    assert backend.num_completed == 0


async def test_leaving_a_busy_stream_unread(encoder: PromptEncoder) -> None:
    """A client that does not read stops the stream by flow control, and ends it by leaving."""
    backend = ScriptedBackend(BUSY)
    async with _serve(backend, encoder) as port:
        _, writer = await _send(port, "/v1/completions", {"model": MODEL, "stream": True, "prompt": "hello"})
        await _until(lambda: backend.num_opened == 1)
        await asyncio.sleep(0.1)
        assert backend.num_closed == 0
        writer.transport.abort()
        await _until(lambda: backend.num_closed == 1)
    assert backend.num_completed == 0


async def test_tokens_are_sent_as_they_come(encoder: PromptEncoder) -> None:
    backend = ScriptedBackend([delta("first"), 1e6])
    async with _serve(backend, encoder) as port:
        reader, writer = await _send(port, "/v1/completions", {"model": MODEL, "stream": True, "prompt": "hello"})
        async with asyncio.timeout(LONG_S):
            assert b"first" in await reader.readuntil(b'"first"')
        writer.close()
        await _until(lambda: backend.num_closed == 1)


async def test_body_over_the_limit_is_answered_while_it_is_sent(encoder: PromptEncoder) -> None:
    async with _serve(ScriptedBackend(), encoder) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/v1/completions"
        response = await client.post(url, content=b"x" * 10_000_000, headers={"content-type": "application/json"})
        assert response.status_code == 413
        good = await client.post(url, json={"model": MODEL, "prompt": "hello"})
        assert good.status_code == 200
