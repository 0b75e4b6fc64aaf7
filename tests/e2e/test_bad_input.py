"""Bad input is refused with a reason, and the server goes on."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import LONG_S, Server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "hello"}
TOOL_WITHOUT_NAME = {"type": "function", "function": {}}


@pytest.fixture
def http(base_url: str, model_name: str) -> Iterator[httpx.Client]:
    """After the bad request, a good one must be answered."""
    with httpx.Client(base_url=base_url, timeout=LONG_S) as client:
        yield client
        good = client.post(COMPLETIONS, json={"model": model_name, "prompt": "hello", "max_tokens": 2})
        assert good.status_code == 200, good.text


def _check(response: httpx.Response, status: int, param: str | None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "change", "status", "param"),
    [
        (COMPLETIONS, {"prompt": "hello " * 5000}, 400, "prompt"),
        (COMPLETIONS, {"model": "no-such-model"}, 404, "model"),
        (COMPLETIONS, {"temperature": float("nan")}, 400, "temperature"),
        (CHAT, {"tools": [TOOL_WITHOUT_NAME]}, 400, "tools[0].function.name"),
    ],
)
def test_refused_field(
    http: httpx.Client, model_name: str, path: str, change: dict[str, Any], status: int, param: str, stream: bool
) -> None:
    """``tests/unit/services/api/test_api_bad_input.py`` has every field; these are under HTTP."""
    base = {"prompt": "hello"} if path == COMPLETIONS else {"messages": [USER]}
    body = json.dumps({"model": model_name, "stream": stream, **base, **change})
    _check(http.post(path, content=body, headers={"content-type": "application/json"}), status, param)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b'{"model": ', 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413),
    ],
    ids=["empty", "cut short", "deeply nested", "10 MB"],
)
def test_refused_body(http: httpx.Client, path: str, content: bytes, status: int) -> None:
    _check(http.post(path, content=content, headers={"content-type": "application/json"}), status, None)


@pytest.mark.parametrize(
    ("body", "statuses"),
    [
        (b"Content-Length: 5\r\nContent-Length: 7\r\n\r\nhello", {400}),
        # Longer than a body may be; a close may overtake the answer to a client that still sends.
        (b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b"[" * 65536 + b"\r\n") * 100, {0, 413}),
    ],
    ids=["two lengths", "chunks without end"],
)
def test_a_hostile_body_is_cut_off(server: Server, http: httpx.Client, body: bytes, statuses: set[int]) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    status = 0
    with socket.create_connection(("127.0.0.1", server.port), LONG_S) as connection, contextlib.suppress(OSError):
        connection.sendall(head + body)
        reply = connection.recv(1 << 16)
        status = int(reply.split()[1]) if reply else 0
    assert status in statuses
    assert http.get("/health").status_code == 200
