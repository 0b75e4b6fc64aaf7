"""Calls an ASGI application in this process: no socket, no HTTP client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope

from farsight.core.errors import FarsightError


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer.

    Attributes:
        headers: By their names in lower case.
    """

    status: int
    headers: dict[str, str]
    body: bytes


async def post_json(app: ASGIApp, path: str, body: bytes) -> Reply:
    """The application's answer to one POST; cancelling it cancels the request.

    Raises:
        FarsightError: The application returned without an answer.
        Exception: Any error that the application raised.
    """
    status: int | None = None
    headers: dict[str, str] = {}
    parts: list[bytes] = []

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update((name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"])
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(_scope(path, body), _receive(body), send)
    if status is None:
        raise FarsightError(f"the application gave no answer to POST {path}")
    return Reply(status, {name.lower(): value for name, value in headers.items()}, b"".join(parts))


def _scope(path: str, body: bytes) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"batch"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
    }


def _receive(body: bytes) -> Receive:
    """Sends the body, then blocks: this client never disconnects."""
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.get_running_loop().create_future()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
