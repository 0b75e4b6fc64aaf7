"""Errors of Ray Serve's own proxy, in the shape of the OpenAI API: ``server.proxy = "serve"``.

The proxy reports its own errors in plain text: a replica died, there is none, or it is starting.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farsight.services.proxy.haproxy_config import HONEST_STATUS, RETRY_AFTER_S, error_json
from farsight.services.proxy.timed_http import time_proxy

logger = logging.getLogger(__name__)

_RAYS_OWN = "/-/"
"""Ray's own pages on the proxy, for operators."""


def middlewares() -> list[Middleware]:
    """The middleware that Ray Serve puts around its proxy (``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``).

    The proxy's process calls this before it listens, so its connections get their limits here too.
    """
    time_proxy()
    return [Middleware(OpenAIErrors)]


class OpenAIErrors:
    """Replaces the body of an error in plain text, and a status that says something else than what happened.

    The proxy says 500 where a replica died and 404 where none has started. These, an exception of the proxy and a
    missing response become a 503 that may be repeated.
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
            await _send_error(503, (), send)


async def _send_error(status: int, headers: Iterable[tuple[bytes, bytes]], send: Send) -> None:
    status = HONEST_STATUS.get(status, status)
    body = error_json(status).encode()
    told = MutableHeaders(raw=list(headers))
    if status == 503:
        told["retry-after"] = str(RETRY_AFTER_S)
    told["content-type"] = "application/json"
    told["content-length"] = str(len(body))
    await send({"type": "http.response.start", "status": status, "headers": told.raw})
    await send({"type": "http.response.body", "body": body})


def _is_plain_error(start: Message) -> bool:
    kind = next((value for name, value in start.get("headers", ()) if name.lower() == b"content-type"), b"")
    return start["status"] >= 400 and not kind.startswith(b"application/json")
