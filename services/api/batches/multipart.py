"""The parts of a ``multipart/form-data`` body that has been read as a whole (RFC 7578)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.message import Message

from farsight.services.api.errors import ApiError

_MAX_PARTS = 16
_MAX_HEAD_BYTES = 8192
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")


@dataclass(frozen=True, slots=True)
class FormPart:
    """
    Attributes:
        filename: None for a plain field.
    """

    filename: str | None
    data: bytes


def parse_form(content_type: str, body: bytes) -> dict[str, FormPart]:
    """The parts by their names.

    Raises:
        ApiError: 400: not such a body, too many parts, or two of one name.
    """
    delimiter = b"--" + _boundary(content_type)
    if not body.startswith(delimiter):
        raise _refused("it does not begin with its boundary")
    parts: dict[str, FormPart] = {}
    at = len(delimiter)
    while body[at : at + 2] != b"--":
        if body[at : at + 2] != b"\r\n":
            raise _refused("a boundary is not followed by a line end")
        end = body.find(b"\r\n" + delimiter, at)
        if end < 0:
            raise _refused("its last boundary is missing")
        name, part = _part(body, at + 2, end)
        if name in parts:
            raise _refused(f"two parts are named {name!r}")
        parts[name] = part
        if len(parts) > _MAX_PARTS:
            raise _refused(f"it has more than {_MAX_PARTS} parts")
        at = end + 2 + len(delimiter)
    return parts


def _boundary(content_type: str) -> bytes:
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_param("boundary")
    if message.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        shown = content_type[:100]
        raise ApiError(
            f"Content-Type: got {shown!r}, expected multipart/form-data with a boundary",
            status=415,
            code="unsupported_media_type",
        )
    if not _BOUNDARY.fullmatch(boundary):
        raise _refused("its boundary is not one of RFC 2046")
    return boundary.encode("ascii")


def _part(body: bytes, begin: int, end: int) -> tuple[str, FormPart]:
    head_end = body.find(b"\r\n\r\n", begin, min(end, begin + _MAX_HEAD_BYTES))
    if head_end < 0:
        raise _refused("a part has no headers, or too long ones")
    message = Message()
    for line in body[begin:head_end].split(b"\r\n"):
        header, colon, value = line.partition(b":")
        if colon and header.strip().lower() == b"content-disposition":
            message["content-disposition"] = value.strip().decode("utf-8", "replace")
    name = message.get_param("name", header="content-disposition")
    if message.get_content_disposition() != "form-data" or not isinstance(name, str) or not name:
        raise _refused("a part has no name")
    return name, FormPart(message.get_filename(), body[head_end + 4 : end])


def _refused(why: str) -> ApiError:
    return ApiError(f"The multipart body cannot be read: {why}.", code="invalid_multipart")
