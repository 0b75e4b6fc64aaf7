"""Bodies that a route reads by itself, since they are large."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from services.api.middleware import parse_object

_Body = TypeVar("_Body", bound=BaseModel)


def checked(kind: type[_Body], fields: dict[str, Any]) -> _Body:
    """A body of this kind.

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
    """A large body, read in a thread."""
    return await asyncio.to_thread(lambda: checked(kind, parse_object(body)))
