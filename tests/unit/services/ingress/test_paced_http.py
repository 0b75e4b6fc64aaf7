"""The HTTP server of an ingress replica, with a pace that a test sets itself."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop

from farsight.core.config.server import ServerConfig
from farsight.core.errors import CapacityError
from farsight.services.api.middleware import LoopPace
from farsight.services.ingress.ingress import connection_limits
from farsight.services.ingress.paced_http import ACCEPTED_PER_TURN, PacedServer, _find_listener
from farsight.services.proxy.timed_http import ConnectionLimits
from tests.unit.services.uvicorn_server import send_whole, until, uvicorn_server

LIMITS = ConnectionLimits.of(ServerConfig())
POST = b"POST /work HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\n\r\n{}"
GET = b"GET /look HTTP/1.1\r\nHost: here\r\n\r\n"


class HeldPace(LoopPace):
    """Admits what a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Callable[[], None]] = []

    def submit(self, job: Callable[[], None], weight: int = 1) -> None:
        self.jobs.append(job)

    def admit(self) -> None:
        self.jobs.pop(0)()


class App:
    """Answers with the path, and counts."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        self.paths.append(scope["path"])
        await send_whole(send, scope["path"].encode())


def serving(
    app: App, pace: LoopPace, reason: Callable[[], CapacityError | None] = lambda: None
) -> AbstractAsyncContextManager[tuple[uvicorn.Server, int]]:
    return uvicorn_server(app, PacedServer(pace, LIMITS, reason))


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def reply(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    return await reader.readexactly(5)


async def test_a_request_is_not_begun_before_it_is_admitted_and_looks_go_ahead() -> None:
    app, pace = App(), HeldPace()
    async with serving(app, pace) as (_, port):
        reader, writer = await connect(port)
        writer.write(POST)
        await until(lambda: pace.jobs)
        looking, look = await connect(port)
        look.write(GET)
        assert await reply(looking) == b"/look"
        assert app.paths == ["/look"]
        pace.admit()
        assert await reply(reader) == b"/work"
        writer.write(POST)  # the next of the same connection
        await until(lambda: pace.jobs)
        assert app.paths == ["/look", "/work"]
        pace.admit()
        assert await reply(reader) == b"/work"
        writer.close()
        look.close()


async def test_a_body_that_comes_later_is_not_held_again() -> None:
    app, pace = App(), HeldPace()
    async with serving(app, pace) as (_, port):
        reader, writer = await connect(port)
        writer.write(POST[:-2])
        await until(lambda: pace.jobs)
        pace.admit()
        writer.write(POST[-2:])
        assert await reply(reader) == b"/work"
        assert not pace.jobs
        writer.close()


async def test_a_client_that_has_gone_costs_nothing() -> None:
    app, pace = App(), HeldPace()
    async with serving(app, pace) as (server, port):
        _, writer = await connect(port)
        writer.write(POST)
        await until(lambda: pace.jobs)
        [connection] = server.server_state.connections
        connection.transport.abort()
        await until(lambda: not server.server_state.connections)
        pace.admit()
        await asyncio.sleep(0)
        assert not app.paths
        writer.close()


async def test_what_waits_when_the_server_stops_is_still_answered() -> None:
    app, pace = App(), HeldPace()
    async with serving(app, pace) as (server, port):
        reader, writer = await connect(port)
        writer.write(POST)
        await until(lambda: pace.jobs)
        server.should_exit = True
        assert await reply(reader) == b"/work"
        assert await reader.read() == b""
        pace.admit()  # too late, and harmless
        assert app.paths == ["/work"]
        writer.close()


async def test_looking_for_the_listening_socket_leaves_no_file_open() -> None:
    async with serving(App(), HeldPace()) as (_, port):  # the event loop has files that are no sockets
        before = _num_open_files()
        found = _find_listener(port)
        assert found is not None
        assert _find_listener(1) is None
        assert _num_open_files() <= before  # what earlier tests left open may be closed meanwhile


def _num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_many_connections_are_accepted_in_a_turn(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """uvloop by itself takes one."""
    count = 5 * ACCEPTED_PER_TURN

    async def turns_to_accept() -> int:
        async with serving(App(), HeldPace()) as (server, port):
            _, first = await connect(port)  # tells where the server listens
            await until(lambda: server.server_state.connections)
            clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
            turns = 0
            while len(server.server_state.connections) <= count:
                await asyncio.sleep(0)
                turns += 1
                assert turns < 10_000_000
            for client in clients:
                client.close()
            first.close()
        return turns

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(turns_to_accept()) < count / 4


def test_an_ingress_replica_does_not_count_the_connections_of_haproxy_as_those_of_one_client() -> None:
    server = ServerConfig(max_connections_per_address=20, head_timeout_s=3.0)
    behind = connection_limits(server, behind_haproxy=True)
    assert (behind.per_address, behind.head_s) == (0, 3.0)
    assert connection_limits(server, behind_haproxy=False) == ConnectionLimits.of(server)


async def test_what_is_refused_is_not_read_and_does_not_wait_behind_what_is() -> None:
    """The refusal comes while the other request is held; the connection goes on, and looks on it are answered."""
    app, pace = App(), HeldPace()
    full: list[CapacityError] = []
    tokens = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\n\r\n"
    async with serving(app, pace, lambda: full[0] if full else None) as (_, port):
        held, holding = await connect(port)
        holding.write(tokens + b"{}")
        await until(lambda: pace.jobs)
        full.append(CapacityError("predicted queue delay: 9 s, limit 2 s", 7.0))
        reader, writer = await connect(port)
        writer.write(tokens)
        writer.write(b"{}")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 7" in head.lower()
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
        assert b"rate_limit_exceeded" in await reader.readexactly(length)
        writer.write(GET)
        assert await reply(reader) == b"/look"
        writer.write(POST)  # asks for no tokens
        await until(lambda: len(pace.jobs) == 2)
        assert app.paths == ["/look"]
        pace.admit()
        assert (await held.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        full.clear()
        pace.admit()
        assert await reply(reader) == b"/work"
        writer.write(tokens + b"{}")
        await until(lambda: pace.jobs)
        pace.admit()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()
        holding.close()
