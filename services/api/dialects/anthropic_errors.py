"""Errors of Anthropic's routes in Anthropic's shape, whichever layer refuses."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.errors import ApiError

PREFIX = "/v1/messages"
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def shape(status: int, message: str) -> dict[str, Any]:
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that fails."""
    return b"event: error\ndata: " + json.dumps(shape(error.status, error.message)).encode() + b"\n\n"


class AnthropicErrors:
    """Rewrites the bodies of errors under ``PREFIX``; statuses and headers stay."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
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
                    await _send(head, bytes(body), send)

        await self._app(scope, receive, shaped)


async def _send(head: Message, body: bytes, send: Send) -> None:
    with suppress(ValueError, KeyError, TypeError):  # an empty answer, such as one that no client waits for
        body = json.dumps(shape(head["status"], json.loads(body)["error"]["message"])).encode()
    MutableHeaders(scope=head)["content-length"] = str(len(body))
    await send(head)
    await send({"type": "http.response.body", "body": body})
