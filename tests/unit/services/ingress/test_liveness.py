"""What a thread says of an event loop, whatever the loop does."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from farsight.services.api.readiness import Readiness
from farsight.services.ingress.liveness import BEAT_S, HUNG_S, MAX_CONNECTIONS, MAX_REQUEST_BYTES, Liveness, publish
from farsight.services.proxy.haproxy_config import read_liveness

LONG_S = 120.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def started(liveness: Liveness) -> AsyncIterator[int]:
    try:
        yield await liveness.start()
    finally:
        liveness.stop()


def get(port: int, path: str, method: str = "GET") -> tuple[int, Any]:
    """In the thread of the watched loop: it stands still meanwhile."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)
    with closing(connection):
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


def draining() -> Readiness:
    readiness = Readiness()
    readiness.is_draining = True
    return readiness


@pytest.mark.parametrize(
    ("takes_requests", "readiness", "statuses", "code"),
    [
        pytest.param(True, Readiness(), [200, 200, 200], None, id="well"),
        pytest.param(False, Readiness(), [200, 503, 503], "unhealthy", id="cannot take requests"),
        pytest.param(True, draining(), [200, 200, 503], "draining", id="draining"),
        pytest.param(True, Readiness(silence_s=0.0), [200, 503, 503], "unhealthy", id="without a Supervisor"),
    ],
)
async def test_it_answers_while_the_loop_is_held(
    takes_requests: bool, readiness: Readiness, statuses: list[int], code: str | None
) -> None:
    async with started(Liveness(lambda: takes_requests, readiness=readiness)) as port:
        assert [get(port, path)[0] for path in ("/-/healthz", "/health", "/health/ready")] == statuses
        assert get(port, "/health/ready")[1].get("error", {}).get("code") == code


async def test_a_loop_that_is_stuck_counts_as_dead_and_one_that_turns_again_does_not() -> None:
    clock = Clock()
    async with started(Liveness(lambda: True, clock)) as port:
        clock.now = HUNG_S - 1
        for path in ("/-/healthz", "/health?by=probe"):
            assert get(port, path) == (200, {"status": "ok"})
        clock.now = HUNG_S
        for path in ("/-/healthz", "/health"):
            status, body = get(port, path)
            assert status == 503
            assert body["error"]["code"] == "unhealthy"
        async with asyncio.timeout(LONG_S):
            while get(port, "/health")[0] != 200:  # noqa: ASYNC110 - another thread tells
                await asyncio.sleep(BEAT_S)


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/health", 405), ("GET", "/v1/models", 404)])
async def test_it_answers_nothing_else(method: str, path: str, status: int) -> None:
    async with started(Liveness(lambda: True)) as port:
        found, body = get(port, path, method)
        assert (found, set(body["error"])) == (status, {"message", "type", "param", "code"})


async def test_callers_who_send_too_much_or_nothing_are_bounded() -> None:
    async with started(Liveness(lambda: True)) as port:
        with socket.create_connection(("127.0.0.1", port), LONG_S) as greedy:
            greedy.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * (4 * MAX_REQUEST_BYTES))
            assert _closed(greedy)
        silent = [socket.create_connection(("127.0.0.1", port), LONG_S) for _ in range(MAX_CONNECTIONS)]
        with socket.create_connection(("127.0.0.1", port), LONG_S) as one_more:
            assert _closed(one_more)
        for connection in silent:
            connection.close()
        async with asyncio.timeout(LONG_S):
            while True:
                try:
                    assert get(port, "/health")[0] == 200
                    return
                except (OSError, http.client.HTTPException):  # it has not seen yet that they have gone
                    await asyncio.sleep(0.01)


def _closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_what_is_published_can_be_read(tmp_path: Path) -> None:
    assert read_liveness(tmp_path) == {}
    publish(1234, "abc", tmp_path)
    publish(1235, "def", tmp_path)
    publish(1236, "abc", tmp_path)
    (tmp_path / "liveness" / ".half").write_text("")
    assert read_liveness(tmp_path) == {"abc": 1236, "def": 1235}
