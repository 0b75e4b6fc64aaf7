"""Two pure ASGI layers around the application: a limit on bodies, and a 500 response for unhandled exceptions."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.errors import ApiError, as_api_error
from services.api.pace import PER_TURN, Pace

_DROP_FACTOR = 4
_DROP_S = 5.0
"""How much of a refused body is still read: a multiple of the size limit, and a number of seconds."""

_HEAVY_BYTES = 4096
"""Bytes of a body whose parsing and tokenising takes about as long as the rest of a request ..."""

_MAX_WEIGHT = 4 * PER_TURN
"""... but a body may use up at most this many turns, since long texts are tokenised in a thread."""


class BodyLimit:
    """Reads a request's body before the application does, and keeps no more than ``max_body_bytes`` of it.

    Most clients lose the response of a server that closes the connection with bytes unread. So the rest of a body over
    the limit is read and dropped, within bounds of size and time, before the refusal is sent.

    A request with a body continues when ``pace`` has room for it: parsing, tokenising and submitting block the event
    loop.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, pace: Pace | None = None) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._pace = Pace() if pace is None else pace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = _content_length(scope)
        if declared > self._max_body_bytes:
            await self._refuse(f"{declared} bytes", scope, receive, send)
            return
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._max_body_bytes:
                body.clear()
                await self._refuse(f"more than {self._max_body_bytes} bytes", scope, receive, send)
                return
        if body:
            await self._pace.turn(min(1 + len(body) // _HEAVY_BYTES, _MAX_WEIGHT))
        await self._app(scope, _replay(bytes(body), receive), send)

    async def _refuse(self, found: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses with 413 and closes the connection, since the rest of the body will not be read."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_DROP_S):
                await _drop(receive, _DROP_FACTOR * self._max_body_bytes)
        message = f"The request body has {found}; the limit is {self._max_body_bytes} bytes."
        headers = {"Connection": "close"}
        error = ApiError(message, status=413, code="request_too_large", headers=headers)
        await error.response()(scope, receive, send)


class LastResort:
    """Turns an unhandled exception into a plain 500 response; its traceback goes to the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await as_api_error(error).response()(scope, receive, send)


async def _drop(receive: Receive, max_bytes: int) -> None:
    more = True
    while more and max_bytes > 0:
        message = await receive()
        max_bytes -= len(message.get("body", b""))
        more = message.get("more_body", False)


def _content_length(scope: Scope) -> int:
    """The declared length in bytes; 0 if the header is missing or no number, since arriving bytes are counted too."""
    value = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(value) if value.isdigit() and len(value) < 20 else 0


def _replay(body: bytes, receive: Receive) -> Receive:
    """Passes on the whole body as one message, then the server's own messages, such as the disconnect."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
