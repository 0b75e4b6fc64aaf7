"""Errors of Anthropic's routes in Anthropic's shape, whichever layer refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def shape(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """Anthropic's type and message, beside the field and the code that our errors name."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {**error, "type": kind}}


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that fails."""
    return b"event: error\ndata: " + json.dumps(shape(error.status, error.body()["error"])).encode() + b"\n\n"


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
        body = json.dumps(shape(head["status"], json.loads(body)["error"])).encode()
    MutableHeaders(scope=head)["content-length"] = str(len(body))
    await send(head)
    await send({"type": "http.response.body", "body": body})
