"""Bodies of requests: parsed and checked before FastAPI sees them, or by the route itself where they are large."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, get_type_hints

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from farsight.services.api.errors import ApiError
from farsight.services.api.fields import shown

LARGE_BODY_BYTES = 64 * 1024
"""From here on parsing may hold the event loop for more than some 10 ms, whatever JSON it is."""


class JsonRoute(APIRoute):
    """Parses a POST body before FastAPI sees it, so that FastAPI always gets a JSON object; refuses a large one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            if request.method != "POST":
                return await handle(request)
            _check_content_type(request.headers.get("content-type"))
            parsed = _JsonRequest(request.scope, request.receive)
            body = await parsed.body()
            if len(body) >= LARGE_BODY_BYTES:
                return await self.handle_large(parsed, body)
            parsed.set_json(parse_object(body))
            return await handle(parsed)

        return handle_json

    async def handle_large(self, request: Request, body: bytes) -> Response:
        """Returns the reply to a body of ``LARGE_BODY_BYTES`` or more.

        Raises:
            ApiError: 413.
        """
        message = f"The request body has {len(body)} bytes; {self.path} takes fewer than {LARGE_BODY_BYTES}."
        raise ApiError(message, status=413, code="request_too_large")


class LargeBodyRoute(JsonRoute):
    """Reads a large body in a thread, and answers as to any other; its endpoint takes ``body`` and ``request``."""

    async def handle_large(self, request: Request, body: bytes) -> Response:
        whole = await read_whole(get_type_hints(self.endpoint)["body"], body)
        reply = await self.endpoint(body=whole, request=request)
        return reply if isinstance(reply, Response) else JSONResponse(reply.model_dump(mode="json"))


class _JsonRequest(Request):
    def set_json(self, value: dict[str, Any]) -> None:
        self._parsed = value

    async def json(self) -> dict[str, Any]:
        return self._parsed


def parse_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object that the bytes hold.

    Raises:
        ApiError: 400, saying at which position the bytes are wrong.
    """
    if not body.strip():
        raise _bad_json("The request body is empty")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _bad_json(f"The request body is not UTF-8 at byte {error.start} (0x{body[error.start]:02x})") from error
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno} (character {error.pos})"
        raise _bad_json(f"The request body is not JSON: {error.msg} at {where}") from error
    except UnicodeEncodeError as error:
        raise _bad_json("The request body holds half of a surrogate pair, which is not a character") from error
    except RecursionError as error:
        raise _bad_json("The request body is nested too deeply") from error
    except ValueError as error:
        raise _bad_json("The request body holds an integer with too many digits") from error
    if not isinstance(value, dict):
        names = {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
        raise _bad_json(f"The request body is {names.get(type(value), 'a number')}")
    return value


def _bad_json(problem: str) -> ApiError:
    return ApiError(f"{problem}; expected a JSON object in UTF-8.", code="invalid_json")


def _check_content_type(value: str | None) -> None:
    """Web pages of other sites may send bodies without this type and without asking; with it, browsers ask first."""
    media_type = (value or "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        found = repr(shown(media_type)) if media_type else "none"
        message = f"Content-Type: got {found}, expected 'application/json'."
        raise ApiError(message, status=415, code="unsupported_media_type")


_Body = TypeVar("_Body", bound=BaseModel)


def checked(kind: type[_Body], fields: dict[str, Any]) -> _Body:
    """Returns a body of this kind.

    Raises:
        RequestValidationError: It is none; the fields are named as their client wrote them.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise body_error(error) from error


def body_error(error: ValidationError) -> RequestValidationError:
    return RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)])


async def read_whole(kind: type[_Body], body: bytes) -> _Body:
    """Reads a large body in a thread."""
    return await asyncio.to_thread(lambda: checked(kind, parse_object(body)))
