"""Bodies that a route reads by itself, since they are large."""

from __future__ import annotations

import asyncio
import itertools
import operator
import re
from collections.abc import Iterator
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from core.errors import InvalidValueError
from services.api.fields import MAX_PROMPTS
from services.api.middleware import parse_object

_TOKEN = re.compile(rb'"(?>[^"\\]+|\\.)*+"|\[[\s\d,-]*+\]|[\[\]{}:,]', re.DOTALL)
"""A string, a list of token ids, or a mark of JSON."""

_MAX_TOKENS = 4096
_MAX_SCANNED = 128 * 1024
"""Bytes; 257 prompts of 500 bytes each are seen, within 4 ms."""

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


def check_num_prompts(body: bytes) -> None:
    """Refuses a completion of too many prompts before it is parsed, which waits for a process and costs one.

    It looks at no more of the body than the first prompts beyond the limit, and leaves what is unusual to the parser.

    Raises:
        InvalidValueError: It has more prompts than one request may.
    """
    tokens = itertools.islice(map(operator.itemgetter(0), _TOKEN.finditer(body, 0, _MAX_SCANNED)), _MAX_TOKENS)
    depth, last = 0, b""
    for token in tokens:
        if token == b":" and depth == 1 and last == b'"prompt"':
            if _is_longer(tokens, MAX_PROMPTS):
                raise InvalidValueError("prompt", "more prompts", f"at most {MAX_PROMPTS} prompts in a request")
            return
        depth += _step(token)
        last = token


def _is_longer(tokens: Iterator[bytes], most: int) -> bool:
    """Returns whether a list of more than ``most`` prompts follows."""
    if next(tokens, b"") != b"[" or next(tokens, b",")[:1] not in (b'"', b"["):
        return False  # one prompt, or what is none
    depth, count = 1, 1
    for token in tokens:
        depth += _step(token)
        count += token == b"," and depth == 1
        if count > most or depth <= 0:
            break
    return count > most


def _step(token: bytes) -> int:
    return (token in (b"[", b"{")) - (token in (b"]", b"}"))


async def read_whole(kind: type[_Body], body: bytes) -> _Body:
    """A large body, read in a thread."""
    return await asyncio.to_thread(lambda: checked(kind, parse_object(body)))
