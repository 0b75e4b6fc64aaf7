"""Parses bytes into a JSON object, with errors that name the position of the fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from services.api.errors import ApiError


class JsonRoute(APIRoute):
    """Parses a POST body before FastAPI sees it, so that FastAPI always gets a JSON object."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            if request.method != "POST":
                return await handle(request)
            _check_content_type(request.headers.get("content-type"))
            parsed = _JsonRequest(request.scope, request.receive)
            parsed.set_json(parse_object(await parsed.body()))
            return await handle(parsed)

        return handle_json


class _JsonRequest(Request):
    def set_json(self, value: dict[str, Any]) -> None:
        self._parsed = value

    async def json(self) -> dict[str, Any]:
        return self._parsed


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object that the bytes hold.

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
        found = repr(media_type) if media_type else "none"
        message = f"Content-Type: got {found}, expected 'application/json'."
        raise ApiError(message, status=415, code="unsupported_media_type")
