"""Every error response has OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from farsight.core.errors import CapacityError, FarsightError, InvalidValueError
from farsight.services.api.fields import EXPECTED, shown

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
_MAX_FIELDS = 5
_KIND = re.compile(r"str|int|float|bool|(?:literal|list|dict)\[.*\]|[A-Z][a-z]\w*", re.DOTALL)

PREDICTED = "X-Farsight-Retry-After-S"
"""``Retry-After`` holds whole seconds; this header the prediction itself. Client libraries do not read it, so that
not all refused clients come back at the instant at which there is room for one of them."""

_TYPE_PHRASES = {
    "missing": "a value",
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    error: ErrorFields


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReply, "description": "The request is invalid for this server."},
    "5XX": {"model": ErrorReply, "description": "The server failed; the request may be sent again."},
}
"""What the schema of the API says of errors."""


class ApiError(Exception):
    """An error response.

    Args:
        message: What the request held and what would be right.
        status: The HTTP status.
        kind: OpenAI's ``type``; empty for the usual one of the status.
        param: The wrong field, named as the client wrote it.
        code: A stable name for programs to test.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.message = message
        self.status = status
        self.kind = kind or (SERVER_ERROR if status >= 500 else INVALID_REQUEST)
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self) -> Response:
        """Encodes as ASCII with escapes, since a message may quote text that has no UTF-8 form."""
        return Response(json.dumps(self.body()), self.status, self.headers, "application/json")


def internal_error() -> ApiError:
    """The 500 response for a defect of the server; it reveals no details."""
    message = "The server failed to process the request; its log has the details."
    return ApiError(message, status=500, code="internal_error")


def unhealthy() -> ApiError:
    """The ``/health`` response while no replica can run requests."""
    message = "The service cannot accept requests now."
    return ApiError(message, status=503, code="unhealthy")


def unavailable(why: str) -> ApiError:
    """What a request gets that this server could not serve through no fault of its sender."""
    message = f"{why} The request may be sent again."
    return ApiError(message, status=503, code="unavailable", headers={"Retry-After": "1"})


@contextlib.contextmanager
def or_unavailable() -> Iterator[None]:
    """Turns the error of a component that does not answer now into a 503 response."""
    try:
        yield
    except FarsightError as error:
        raise ApiError(str(error), status=503, code="unavailable") from error


def as_api_error(error: Exception) -> ApiError:
    """Turns any exception into an error response; an unexpected one is logged with its traceback."""
    match error:
        case ApiError():
            return error
        case CapacityError():
            retry_after_s = error.retry_after_s
            headers = {"Retry-After": str(max(1, math.ceil(retry_after_s))), PREDICTED: f"{retry_after_s:.3f}"}
            kind, code = "rate_limit_error", "rate_limit_exceeded"
            return ApiError(str(error), status=429, kind=kind, code=code, headers=headers)
        case InvalidValueError():
            return ApiError(str(error), param=error.field, code="invalid_value")
        case RequestValidationError():
            return _from_validation(error.errors())
        case HTTPException():
            return _from_http(error)
    logger.error("a request failed", exc_info=error)
    return internal_error()


def install_error_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        found = as_api_error(error)
        if found.status == 404 and isinstance(error, HTTPException):
            found.message = f"No route {request.method} {shown(request.url.path)}; /docs lists all routes."
        return found.response()

    for kind in (ApiError, CapacityError, InvalidValueError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


def _from_http(error: HTTPException) -> ApiError:
    headers = dict(error.headers or {})
    if error.status_code == 405:
        message = f"Method not allowed here; allowed: {headers.get('Allow', 'another method')}."
        return ApiError(message, status=405, code="method_not_allowed", headers=headers)
    code = "not_found" if error.status_code == 404 else None
    return ApiError(str(error.detail), status=error.status_code, code=code, headers=headers)


def _from_validation(details: Sequence[Any]) -> ApiError:
    by_field: dict[str, list[Any]] = {}
    for detail in details:
        by_field.setdefault(_path(detail), []).append(detail)
    lines = [_field_text(path, found) for path, found in itertools.islice(by_field.items(), _MAX_FIELDS)]
    if len(by_field) > _MAX_FIELDS:
        lines.append(f"and {len(by_field) - _MAX_FIELDS} more")
    code = {"unknown_field": "unknown_parameter", "missing": "missing_required_parameter"}.get(details[0]["type"])
    return ApiError("; ".join(lines), param=_path(details[0]) or None, code=code or "invalid_value")


def _field_text(path: str, details: Sequence[Any]) -> str:
    """Returns what is wrong with a field; a field of several kinds has a detail for each."""
    context = details[0].get("ctx", {})
    if details[0]["type"] == "unknown_field":
        return f"{path}: unknown field, {context['hint']}"
    if details[0]["type"] == "missing":
        return f"{path or 'the body'}: missing, expected {_expected(details[0])}"
    found = context.get("got", details[0]["input"])
    expected = " or ".join(dict.fromkeys(map(_expected, details[:_MAX_FIELDS])))
    return str(InvalidValueError(path or "the body", found, expected))


def _path(detail: Mapping[str, Any]) -> str:
    """The field as the client wrote it, such as ``messages[0].role``."""
    steps = _steps(detail)
    joined = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return shown(f"{joined}{detail.get('ctx', {}).get('suffix', '')}".lstrip("."))


def _expected(detail: Mapping[str, Any]) -> str:
    context = detail.get("ctx", {})
    if "expected" in context and detail["type"] == "refused":
        return str(context["expected"])
    steps = _steps(detail)
    if steps and isinstance(steps[-1], int):
        return "a token id, an integer >= 0" if steps[0] == "stop_token_ids" else "an object"
    name = ".".join(step for step in steps if isinstance(step, str))
    phrase = _TYPE_PHRASES.get(str(detail["type"]), str(detail["msg"]).removeprefix("Input should be "))
    return EXPECTED.get(name) or phrase


def _steps(detail: Mapping[str, Any]) -> list[str | int]:
    """Returns the way to a field, without the names that pydantic gives to the kinds of value that a field may have."""
    return [step for step in detail["loc"][1:] if not (isinstance(step, str) and _KIND.fullmatch(step))]
