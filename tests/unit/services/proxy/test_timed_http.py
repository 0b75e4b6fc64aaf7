"""Hostile clients of one HTTP server: half-open, slow, deaf, and many from one address.

Limits are so short that the end of a client's time comes at once; nothing is checked to come in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import uvloop
from uvicorn.config import HTTP_PROTOCOLS

from core.config.server import ServerConfig
from core.errors import ConfigError
from services.proxy.timed_http import LIMITS_VARIABLE, ConnectionLimits, TimedHttp, time_proxy
from tests.unit.services.uvicorn_server import LONG_S, send_whole, until, uvicorn_server

PATIENT = ConnectionLimits(LONG_S, LONG_S, LONG_S, LONG_S, 0)
SOON_S = 0.02
NUM_BYTES = 64 * 1024 * 1024


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body; ``/much`` with more than sockets hold."""
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = bytes(NUM_BYTES) if scope["path"] == "/much" else str(length).encode()
    await send_whole(send, body)


@contextlib.asynccontextmanager
async def serving(limits: ConnectionLimits) -> AsyncIterator[tuple[int, list[TimedHttp], Counter[str]]]:
    """The port, the connections that were made, and how many each address has."""
    counts: Counter[str] = Counter()
    connections: list[TimedHttp] = []

    def connect(**arguments: Any) -> TimedHttp:
        connections.append(TimedHttp(limits, counts, **arguments))
        return connections[-1]

    async with uvicorn_server(app, connect) as (_, port):
        yield port, connections, counts


async def all_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """Status and error of what comes until the server closes; nothing is status 0."""
    async with asyncio.timeout(LONG_S):
        data = await reader.read()
    head, _, body = data.partition(b"\r\n\r\n")
    return (int(head.split()[1]), json.loads(body)["error"]) if data else (0, {})


def _end_of_patience(connection: TimedHttp) -> float | None:
    timer = connection._patience
    return None if timer is None else timer.when()


HEAD = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 10\r\n\r\n"


@pytest.mark.parametrize(
    ("limits", "sent", "status"),
    [
        (replace(PATIENT, head_s=SOON_S), b"", 0),
        (replace(PATIENT, head_s=SOON_S), b"POST / HTTP/1.1\r\nHost:", 408),
        (replace(PATIENT, body_s=SOON_S), HEAD, 408),
        (replace(PATIENT, body_s=SOON_S), HEAD + b"12345", 408),
        (PATIENT, b"no HTTP\r\n\r\n", 400),
    ],
)
async def test_a_client_that_does_not_go_on_is_given_up(limits: ConnectionLimits, sent: bytes, status: int) -> None:
    async with serving(limits) as (port, _, counts):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        found, error = await all_of(reader)
        assert found == status
        assert not status or set(error) == {"message", "type", "param", "code"}
        writer.close()
    assert not counts


async def test_a_body_may_take_long_as_long_as_it_comes() -> None:
    async with serving(PATIENT) as (port, connections, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        ends: list[float] = []
        for part in (HEAD, b"1234", b"5678"):
            writer.write(part)
            await until(lambda: connections and connections[0]._reads_body)
            await until(lambda: _end_of_patience(connections[0]) not in (None, *ends))
            ends.append(_end_of_patience(connections[0]) or 0.0)
        assert ends == sorted(set(ends))
        writer.write(b"90")
        async with asyncio.timeout(LONG_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(2) == b"10"
        assert connections[0]._patience is None  # from here on it is idle, which uvicorn ends
        assert connections[0].timeout_keep_alive == PATIENT.idle_s
        writer.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_client_that_reads_nothing_is_given_up(make_loop: Any) -> None:
    async def check() -> None:
        async with serving(replace(PATIENT, write_s=SOON_S)) as (port, connections, counts):
            with socket.create_connection(("127.0.0.1", port)) as deaf:
                deaf.sendall(b"GET /much HTTP/1.1\r\nHost: here\r\n\r\n")
                await until(lambda: connections and not counts)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(check())


async def test_an_address_has_only_so_many_connections() -> None:
    async with serving(replace(PATIENT, per_address=3)) as (port, _, counts):
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        await until(lambda: counts["127.0.0.1"] == 3)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        status, error = await all_of(reader)
        assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
        writer.close()
        opened.pop()[1].close()
        await until(lambda: counts["127.0.0.1"] == 2)
        opened.append(await asyncio.open_connection("127.0.0.1", port))
        opened[-1][1].write(HEAD + b"1234567890")
        async with asyncio.timeout(LONG_S):
            assert (await opened[-1][0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        for _, each in opened:
            each.close()


async def test_half_open_connections_cost_a_new_client_nothing_but_their_sockets() -> None:
    """None of them has a task, and a new client is answered while all are open."""
    async with serving(PATIENT) as (port, connections, _):
        half_open = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        await until(lambda: len(connections) == len(half_open))
        assert not any(connection.tasks for connection in connections)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"1234567890")
        async with asyncio.timeout(LONG_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()
        for each in half_open:
            each.close()


def test_rays_proxy_gets_them_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", "before")
    monkeypatch.delenv(LIMITS_VARIABLE, raising=False)
    time_proxy()
    assert HTTP_PROTOCOLS["auto"] == "before"
    limits = ConnectionLimits.of(ServerConfig(head_timeout_s=3.0))
    monkeypatch.setenv(LIMITS_VARIABLE, limits.to_json())
    time_proxy()
    assert callable(HTTP_PROTOCOLS["auto"])
    assert ConnectionLimits(**json.loads(limits.to_json())) == limits == replace(limits, head_s=3.0)


@pytest.mark.parametrize("name", ["head_timeout_s", "body_timeout_s", "idle_timeout_s", "write_timeout_s"])
def test_a_limit_is_a_positive_number(name: str) -> None:
    with pytest.raises(ConfigError, match=f"server.{name}: got 0, expected a number > 0"):
        ServerConfig(**{name: 0})  # type: ignore[arg-type]
