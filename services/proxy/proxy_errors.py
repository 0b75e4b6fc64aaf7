"""Errors of Ray Serve's own proxy, in the shape of the OpenAI API: ``server.proxy = "serve"``.

The proxy reports its own errors in plain text: a replica died, there is none, or it is starting.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.proxy.haproxy_config import error_json

logger = logging.getLogger(__name__)

_RAYS_OWN = "/-/"
"""Ray's own pages on the proxy, for operators."""


def middlewares() -> list[Middleware]:
    """The middleware that Ray Serve puts around its proxy (``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``)."""
    return [Middleware(OpenAIErrors)]


class OpenAIErrors:
    """Replaces the body of an error in plain text; the status stays.

    An exception of the proxy, or a missing response, becomes a 500.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_RAYS_OWN):
            await self._app(scope, receive, send)
            return
        started = replaced = False

        async def replacing(message: Message) -> None:
            nonlocal started, replaced
            started = True
            if message["type"] == "http.response.start" and _is_plain_error(message):
                replaced = True
                await _send_error(message["status"], message.get("headers", ()), send)
            elif not replaced:
                await send(message)

        try:
            await self._app(scope, receive, replacing)
        except Exception:
            if started:
                raise
            logger.exception("a request could not be forwarded")
        if not started:  # Ray's proxy sends nothing when the replica has died, for example.
            await _send_error(500, (), send)


async def _send_error(status: int, headers: Iterable[tuple[bytes, bytes]], send: Send) -> None:
    body = error_json(status).encode()
    told = MutableHeaders(raw=list(headers))
    told["content-type"] = "application/json"
    told["content-length"] = str(len(body))
    await send({"type": "http.response.start", "status": status, "headers": told.raw})
    await send({"type": "http.response.body", "body": body})


def _is_plain_error(start: Message) -> bool:
    kind = next((value for name, value in start.get("headers", ()) if name.lower() == b"content-type"), b"")
    return start["status"] >= 400 and not kind.startswith(b"application/json")
