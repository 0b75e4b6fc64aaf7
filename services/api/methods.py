"""HTTP manners: a path may end with a slash, HEAD is GET without a body, OPTIONS says which methods there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
