"""Servers of HTTP without HAProxy: hostile clients that are half-open, slow, deaf, and many from one address; errors of
Ray Serve's own proxy, and the address of its server for calls between deployments.

Limits are so short that the end of a client's time comes at once; nothing is checked to come in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import httpx
import pytest
import uvloop
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS

from farsight.core.config.server import ServerConfig
from farsight.core.errors import ConfigError
from farsight.services.proxy.ports import keep_on_loopback
from farsight.services.proxy.proxy_errors import OpenAIErrors, middlewares
from farsight.services.proxy.timed_http import LIMITS_VARIABLE, ConnectionLimits, TimedHttp, time_proxy
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


def answering(response: Response) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await response(scope, receive, send)

    return OpenAIErrors(app)


async def get(app: ASGIApp, path: str = "/v1/models") -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        return await client.get(path)


@pytest.mark.parametrize(
    ("status", "told", "code"),
    [(500, 503, "unavailable"), (503, 503, "unavailable"), (404, 503, "unavailable"), (408, 408, "request_timeout")],
)
async def test_plain_text_becomes_an_error_of_the_api_with_an_honest_status(status: int, told: int, code: str) -> None:
    """Ray's proxy says 500 where a replica died, and 404 where none has started."""
    reply = await get(answering(PlainTextResponse("Internal Server Error", status)))
    assert (reply.status_code, reply.headers.get("retry-after")) == (told, "1" if told == 503 else None)
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("the replica died")


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    pass


@pytest.mark.parametrize("app", [broken, silent])
async def test_what_the_proxy_raises_or_does_not_answer_becomes_one_as_well(app: ASGIApp) -> None:
    reply = await get(OpenAIErrors(app))
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")


async def test_a_failure_in_the_middle_of_an_answer_ends_the_connection() -> None:
    async def ends_early(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await broken(scope, receive, send)

    with pytest.raises(RuntimeError, match="the replica died"):
        await get(OpenAIErrors(ends_early))


async def test_all_else_passes_as_it_is() -> None:
    ours = {"error": {"message": "ours"}}
    assert (await get(answering(JSONResponse(ours, 503)))).json() == ours
    assert (await get(answering(PlainTextResponse("metrics")))).text == "metrics"
    assert (await get(answering(PlainTextResponse("draining", 503)), "/-/healthz")).text == "draining"


def test_ray_finds_it_where_its_environment_says() -> None:
    module, _, name = "farsight.services.proxy.proxy_errors.middlewares".rpartition(".")
    assert [each.cls for each in getattr(importlib.import_module(module), name)()] == [OpenAIErrors]
    assert len(middlewares()) == 1


def test_the_server_is_bound_to_the_loopback_interface_whatever_ray_asks_for() -> None:
    module, bound = ModuleType("replica"), []

    def bind(server: object, address: str) -> int:
        bound.append((server, address))
        return 4321

    module.add_port_to_grpc_server = bind  # type: ignore[attr-defined]
    keep_on_loopback(module)
    assert module.add_port_to_grpc_server("a server", "[::]:0") == 4321
    assert bound == [("a server", "127.0.0.1:0")]


def test_a_ray_that_binds_it_otherwise_is_noticed() -> None:
    with pytest.raises(AttributeError, match="add_port_to_grpc_server"):
        keep_on_loopback(ModuleType("replica"))
