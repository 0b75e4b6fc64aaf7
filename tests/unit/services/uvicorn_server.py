"""A uvicorn server in the loop of a test, started as Ray Serve starts it: on a socket that is bound already."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn

LONG_S = 120.0


@contextlib.asynccontextmanager
async def uvicorn_server(app: Any, protocol: Any) -> AsyncIterator[tuple[uvicorn.Server, int]]:
    """The server and its port."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, http=protocol, lifespan="off", log_level="critical"))
        running = asyncio.create_task(server._serve([bound]))
        await until(lambda: server.started)
        yield server, bound.getsockname()[1]
        server.should_exit = True
        await running


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG_S):
        while not holds():  # noqa: ASYNC110 - the thing waited for has no event
            await asyncio.sleep(0)


async def send_whole(send: Any, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
