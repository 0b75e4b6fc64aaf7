"""A replica that is another server is believed nothing: it sends us nowhere, and fills no memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from farsight.actors.external.openai_server import MAX_PAGE_BYTES, OpenAIServer
from farsight.actors.external.openai_wire import MAX_EVENT_BYTES, BackendFailed, EventReader
from farsight.core.config.actors import ReplicaConfig
from farsight.core.errors import InvalidValueError


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "unix:///run/docker.sock",
        "gopher://127.0.0.1:6379/_FLUSHALL",
        "http://user:password@inside/",
        "http://public@169.254.169.254/",
        "http://inside/v1?x=1",
        "http://inside/#@outside",
        "http://inside/v1\r\nHost: outside",
        "//inside/v1",
        "",
    ],
)
def test_addresses_of_other_kinds_are_refused(url: str) -> None:
    with pytest.raises(InvalidValueError, match="url"):
        ReplicaConfig(backend="openai", url=url)


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[OpenAIServer]:
    """What asks a server of these answers."""
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    server = OpenAIServer(ReplicaConfig(backend="openai", url=address), "m", lambda *ids: "", "")
    await server.open()
    try:
        yield server
    finally:
        await server.close()
        await runner.cleanup()
        await asyncio.sleep(0)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_server_sends_nobody_elsewhere(status: int) -> None:
    """Not the probe and not the request, with which its key would go along."""
    reached: list[str] = []

    async def inside(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.json_response({"data": [{"id": "m", "max_model_len": 100}]})

    async def move(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": f"http://{request.host}/inside"})

    app = web.Application()
    app.router.add_get("/inside", inside)
    app.router.add_post("/inside", inside)
    app.router.add_route("*", "/{tail:v1/.*|health}", move)
    async with served(app) as server:
        for generates in (False, True):
            with pytest.raises(BackendFailed):
                await server.probe(generates=generates)
        with pytest.raises(BackendFailed):
            await server._generate()
        assert not reached


async def test_a_page_without_end_is_given_up() -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        reply = web.StreamResponse()
        await reply.prepare(request)
        while True:
            await reply.write(bytes(65536))
            sent += 65536

    app = web.Application()
    app.router.add_get("/{tail:.*}", endless)
    async with served(app) as server:
        with pytest.raises(BackendFailed, match="more than"):
            await server.probe(generates=False)
        assert sent < 64 * MAX_PAGE_BYTES, "what fits the buffers of sockets"


def test_an_event_without_end_is_given_up() -> None:
    reader = EventReader()
    with pytest.raises(BackendFailed, match="an event"):
        for _ in range(2 + MAX_EVENT_BYTES // 65536):
            list(reader.feed(bytes(65536)))
