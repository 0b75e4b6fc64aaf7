"""What a request passes before the application sees it: a limit, a pace, and the manners of HTTP.

Also the reply to a stray exception, and the shape of errors under the addresses of other APIs. A path may end with a
slash, HEAD is GET without a body, OPTIONS says which methods there are.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farsight.services.api.errors import ApiError, as_api_error

PER_TURN = 4
"""A request uses about 2 ms of the loop, spread over about six turns, until it is sent to the Router. With four new
requests per turn, a turn takes about 10 ms, however many requests wait."""

_DROP_FACTOR = 4
_DROP_S = 5.0
"""How much of a refused body is still read: a multiple of the size limit, and a number of seconds."""

MAX_LARGER = 4
"""Bodies of more than the usual limit that are read at once."""

_HEAVY_BYTES = 4096
"""Bytes of a body whose parsing and tokenising takes about as long as the rest of a request ..."""

_MAX_WEIGHT = 4 * PER_TURN
"""... but a body uses up this many turns at most: a large one is not read on the event loop."""


class BodyLimit:
    """Reads a request's body before the application does, and keeps no more than ``max_body_bytes`` of it.

    Most clients lose the response of a server that closes the connection with bytes unread. So the rest of a body over
    the limit is read and dropped, within bounds of size and time, before the refusal is sent.

    A request with a body continues when ``pace`` has room for it: parsing, tokenising and submitting block the event
    loop.

    Args:
        larger: Limits of paths that take larger bodies; ``MAX_LARGER`` of them are read at once, others get 429.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        pace: LoopPace | None = None,
        larger: Mapping[str, int] | None = None,
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._larger = larger or {}
        self._num_larger = 0
        self._pace = LoopPace() if pace is None else pace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._larger.get(scope["path"]) if scope["method"] == "POST" else None
        if most is None:
            await self._read(self._max_body_bytes, scope, receive, send)
        elif self._num_larger >= MAX_LARGER:
            message = f"{self._num_larger} files are being received; send this one again."
            headers = {"Connection": "close", "Retry-After": "1"}
            error = ApiError(message, status=429, code="too_many_uploads", headers=headers)
            await error.response()(scope, receive, send)
        else:
            self._num_larger += 1
            try:
                await self._read(most, scope, receive, send)
            finally:
                self._num_larger -= 1

    async def _read(self, most: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads a body of at most so many bytes and passes it on."""
        declared = _content_length(scope)
        if declared > most:
            await self._refuse(f"{declared} bytes", most, scope, receive, send)
            return
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > most:
                body.clear()
                await self._refuse(f"more than {most} bytes", most, scope, receive, send)
                return
        if body:
            await self._pace.turn(min(1 + len(body) // _HEAVY_BYTES, _MAX_WEIGHT))
        await self._app(scope, _replay(bytes(body), receive), send)

    async def _refuse(self, found: str, most: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses with 413 and closes the connection, since the rest of the body will not be read."""
        await drop_body(receive, self._max_body_bytes)
        message = f"The request body has {found}; the limit is {most} bytes."
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


async def drop_body(receive: Receive, max_body_bytes: int) -> bool:
    """Reads what is left of a body that is not used, within bounds of size and time, so that the client reads our
    answer.

    Returns:
        Whether that was all of it; otherwise the connection has no further use.
    """
    left = _DROP_FACTOR * max_body_bytes
    more = True
    with suppress(TimeoutError):
        async with asyncio.timeout(_DROP_S):
            while more and left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                more = message.get("more_body", False)
    return not more


def _content_length(scope: Scope) -> int:
    """Returns the declared length in bytes; 0 if the header is missing or no number: arriving bytes are counted too."""
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


class LoopPace:
    """Lets a limited weight of new work begin in each turn of the event loop; the rest waits in FCFS order.

    Without it, requests that arrive together do each of their steps together, and everything else that is due, such as
    the reply to a health check or a token of a stream, waits until all of them have done the step. Work that arrives
    while there is room begins at once.

    Args:
        per_turn: Weight of the work that may begin in one turn. Heavier work also uses the room of later turns.
    """

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._due = False

    def __len__(self) -> int:
        """Returns the number of waiting jobs."""
        return len(self._waiting)

    def submit(self, job: Callable[[], None], weight: int = 1) -> None:
        """Runs the job on the running event loop: now if there is room, else in the first turn with room."""
        if self._left > 0 and not self._waiting:
            self._run(job, weight)
        else:
            self._waiting.append((job, weight))

    async def turn(self, weight: int = 1) -> None:
        """Returns when there is room; a caller that is cancelled while it waits uses no room."""
        if self._left > 0 and not self._waiting:
            self._run(_nothing, weight)
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def admit() -> None:
            if admitted.done():
                self._left += weight
            else:
                admitted.set_result(None)

        self._waiting.append((admit, weight))
        await admitted

    def _run(self, job: Callable[[], None], weight: int) -> None:
        self._left -= weight
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        job()

    def _next_turn(self) -> None:
        self._due = False
        self._left = min(self._per_turn, self._left + self._per_turn)
        while self._waiting and self._left > 0:
            self._run(*self._waiting.popleft())
        if not self._due and (self._waiting or self._left < self._per_turn):
            self._due = True
            asyncio.get_running_loop().call_soon(self._next_turn)


def _nothing() -> None:
    """Does nothing: the waiting caller continues by itself."""


class Slashes:
    """Takes ``/v1/models/`` for ``/v1/models``; stands outside of access control, so that both ask for the same key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/") and scope["path"].strip("/"):
            path = scope["path"].rstrip("/")
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


class Methods:
    """Answers HEAD and OPTIONS on the paths that are named in full.

    Args:
        methods: By path, the methods of its routes.
    """

    def __init__(self, app: ASGIApp, methods: Mapping[str, Iterable[str]]) -> None:
        self._app = app
        self._methods = {path: frozenset(names) for path, names in methods.items() if "{" not in path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = self._methods.get(scope["path"], frozenset()) if scope["type"] == "http" else frozenset()
        if known and scope["method"] == "OPTIONS":
            allowed = sorted({*known, "OPTIONS", *(("HEAD",) if "GET" in known else ())})
            headers = [(b"allow", ", ".join(allowed).encode())]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        elif scope["type"] == "http" and scope["method"] == "HEAD" and "GET" in known:
            await self._app({**scope, "method": "GET"}, receive, _without_body(send))
        else:
            await self._app(scope, receive, send)


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_head


ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATH = "/api"
Shape = Callable[[int, Mapping[str, Any]], dict[str, Any]]
"""From the status and our own fields of an error to the body of another API."""

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Anthropic's type and message, beside the field and the code that our errors name."""
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {**error, "type": kind}}


def ollama_error(_status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Ollama's error, a text, beside the field and the code that our errors name."""
    return {"error": error["message"], "param": error["param"], "code": error["code"]}


_SHAPES = ((ANTHROPIC_PATH, anthropic_error), (f"{OLLAMA_PATH}/", ollama_error))


class ErrorShapes:
    """Rewrites the bodies of errors under the paths of other APIs; statuses and headers stay."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        shape = next((shape for prefix, shape in _SHAPES if path.startswith(prefix)), None)
        if shape is None:
            await self._app(scope, receive, send)
            return
        head: Message | None = None
        body = bytearray()

        async def shaped(message: Message) -> None:
            nonlocal head
            if message["type"] == "http.response.start" and message["status"] >= 400:
                head = message
            elif head is None:
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    await _send_shaped(head, bytes(body), shape, send)

        await self._app(scope, receive, shaped)


async def _send_shaped(head: Message, body: bytes, shape: Shape, send: Send) -> None:
    with suppress(ValueError, KeyError, TypeError):  # an empty answer, such as one that no client waits for
        body = json.dumps(shape(head["status"], json.loads(body)["error"])).encode()
    MutableHeaders(scope=head)["content-length"] = str(len(body))
    await send(head)
    await send({"type": "http.response.body", "body": body})
