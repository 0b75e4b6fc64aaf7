"""The content of a message: a text, or parts that are texts and pictures."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core.images import digest_of
from services.api.fields import CONTENT, is_empty, refused

MAX_PARTS = 4096
"""Parts of one message."""

_DATA_URL = re.compile(r"data:(?:image/[\w.+-]+|application/octet-stream)?(?:;[\w.+=-]+)*;base64,", re.IGNORECASE)
_MAX_HEAD = 256
"""Characters of a data URL before its data."""

_URL = "a picture as a data URL: 'data:image/png;base64,...'"
_DETAILS = ("auto", "low", "high")


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in a message.

    Attributes:
        data: The file.
        digest: Names it (``core.images.digest_of``).
    """

    data: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class MixedContent:
    """Texts and at least one picture, in their order."""

    parts: tuple[str | Picture, ...]

    @property
    def text(self) -> str:
        """The texts alone."""
        return "\n".join(part for part in self.parts if isinstance(part, str))

    def for_template(self) -> list[dict[str, str]]:
        """As chat templates take parts."""
        return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in self.parts]


def check_content(value: Any) -> str | MixedContent | None:
    """What a message's ``content`` says. Text parts alone are joined by line breaks: most templates take one string.

    Raises:
        PydanticCustomError: It is something else.
    """
    if isinstance(value, str | None):
        return value
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PARTS:
        raise refused("", value, CONTENT)
    parts = tuple(_part(index, part) for index, part in enumerate(value))
    if all(isinstance(part, str) for part in parts):
        return "\n".join(part for part in parts if isinstance(part, str))
    return MixedContent(parts)


def text_of(content: str | Sequence[Any]) -> str:
    """The text of a content as ``for_template`` gives it."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _part(index: int, part: Any) -> str | Picture:
    if not isinstance(part, dict):
        raise refused(f"[{index}]", part, 'an object {"type": "text", "text": ...}')
    kind = part.get("type")
    if kind not in ("text", "image_url"):
        raise refused(f"[{index}].type", kind, "'text' or 'image_url' (audio and files are not supported)")
    for name in part.keys() - {"type", kind, "cache_control"}:
        if not is_empty(part[name]):
            raise refused(f"[{index}].{name}", part[name], f"only the fields 'type' and {kind!r}")
    if kind == "image_url":
        return _picture(f"[{index}].image_url", part.get("image_url"))
    if not isinstance(part.get("text"), str):
        raise refused(f"[{index}].text", part.get("text"), "a string")
    return str(part["text"])


def _picture(where: str, value: Any) -> Picture:
    """What an ``image_url`` holds: an object with a URL, or the URL itself. ``detail`` changes nothing: the model's
    own rule says how finely a picture is seen."""
    if isinstance(value, dict):
        detail = value.get("detail")
        if detail is not None and detail not in _DETAILS:
            raise refused(f"{where}.detail", detail, f"one of {', '.join(_DETAILS)}")
        for name in value.keys() - {"url", "detail"}:
            if not is_empty(value[name]):
                raise refused(f"{where}.{name}", value[name], "only the fields 'url' and 'detail'")
        where, value = f"{where}.url", value.get("url")
    if not isinstance(value, str):
        raise refused(where, value, _URL)
    return picture_of(where, value)


def picture_of(where: str, url: str) -> Picture:
    """The picture in a data URL.

    Args:
        where: Its place inside of the validated value.

    Raises:
        PydanticCustomError: It is no data URL of base64.
    """
    head = _DATA_URL.match(url[:_MAX_HEAD])
    if head is None:
        raise refused(where, url, _URL)
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise refused(where, url, f"{_URL} whose data are base64 ({error})") from error
    if not data:
        raise refused(where, url, f"{_URL} with data")
    return Picture(data, digest_of(data))
