"""The content of a message: a text, or parts that are texts and pictures; and where the pictures stand in a prompt."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from farsight.core.errors import InvalidValueError
from farsight.core.images import EncodedImage, ImageFile, ImageSpan, digest_of
from farsight.core.request import Request
from farsight.services.api.backend import ImageInput
from farsight.services.api.fields import CONTENT, is_empty, refused

MAX_PARTS = 4096
"""Parts of one message."""

_DATA_URL = re.compile(r"data:(?:image/[\w.+-]+|application/octet-stream)?(?:;[\w.+=-]+)*;base64,", re.IGNORECASE)
_MAX_HEAD = 256
"""Characters of a data URL before its data."""

_URL = "a picture as a data URL ('data:image/png;base64,...') or by http or https"
_WEB = ("http://", "https://")
_DETAILS = ("auto", "low", "high")


@dataclass(frozen=True, slots=True)
class MixedContent:
    """Texts and at least one picture, in their order.

    A picture's field is empty where it stands where a chat has it; one that is to be fetched has a URL and no data.
    """

    parts: tuple[str | ImageFile, ...]

    @property
    def text(self) -> str:
        """The texts alone."""
        return "\n".join(part for part in self.parts if isinstance(part, str))

    def for_template(self) -> list[dict[str, str]]:
        """As chat templates take parts."""
        return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in self.parts]


def check_content(value: Any) -> str | MixedContent | None:
    """Returns what a message's ``content`` says.

    Raises:
        PydanticCustomError: It is something else.
    """
    if isinstance(value, str | MixedContent | None):  # other APIs' messages come with their pictures
        return value
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PARTS:
        raise refused("", value, CONTENT)
    return content_of([_part(index, part) for index, part in enumerate(value)])


def content_of(parts: Sequence[str | ImageFile]) -> str | MixedContent:
    """What parts of a message are together. Texts alone are joined by line breaks: most templates take one string."""
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else MixedContent(tuple(parts))


def text_of(content: str | list[dict[str, str]]) -> str:
    """Returns the text of a content as ``for_template`` gives it."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _part(index: int, part: Any) -> str | ImageFile:
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


def _picture(where: str, value: Any) -> ImageFile:
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
    try:
        return picture_of(value)
    except NoPicture as error:
        raise refused(where, value, str(error)) from error


class NoPicture(Exception):
    """A text that is no picture; its own text completes "expected ..."."""


def picture_of(url: str, field: str = "") -> ImageFile:
    """Returns the picture in a data URL, or one that is to be fetched.

    Raises:
        NoPicture: It is no such URL.
    """
    head = _DATA_URL.match(url[:_MAX_HEAD])
    if head is not None:
        return picture_from(url[head.end() :], field)
    try:
        return web_picture(url, field)
    except NoPicture as error:
        raise NoPicture(_URL) from error


def web_picture(url: str, field: str = "") -> ImageFile:
    """Returns a picture that is to be fetched.

    Raises:
        NoPicture: It is no such URL.
    """
    if not url[: len(_WEB[1])].lower().startswith(_WEB):
        raise NoPicture("a URL of http or https")
    return ImageFile(field, b"", b"", url)


def picture_from(text: str, field: str = "") -> ImageFile:
    """Returns the picture in base64.

    Raises:
        NoPicture: It is none.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise NoPicture(f"a picture whose data are base64 ({error})") from error
    if not data:
        raise NoPicture("a picture with data")
    return ImageFile(field, data, digest_of(data))


Content = str | MixedContent | None


def pictures_of(contents: Iterable[Content]) -> tuple[ImageFile, ...]:
    """Returns the files of the pictures in the contents of messages, each with the field that holds it."""
    return tuple(
        dataclasses.replace(part, field=part.field or f"{place}.image_url.url") for place, part in _places(contents)
    )


def check_pictures(contents: Iterable[Content], image_input: ImageInput | None) -> None:
    """Raises InvalidValueError if there are pictures and nothing sees them, or more than are taken."""
    for number, (place, part) in enumerate(_places(contents)):
        if image_input is None:
            raise InvalidValueError(part.field or f"{place}.type", "a picture", "'text': text alone is read here")
        if number == image_input.max_per_request:
            expected = f"at most {number} pictures in a request (images.max_per_request)"
            raise InvalidValueError(part.field or place, f"picture {number + 1}", expected)


def check_places(prompt_ids: Sequence[int], num_pictures: int, image_input: ImageInput) -> None:
    """Raises InvalidValueError unless the chat template has made one place for each picture."""
    found = prompt_ids.count(image_input.placeholder_id)
    if found != num_pictures:
        shown = f"{num_pictures} pictures, for which the chat template makes {found} places"
        raise InvalidValueError("messages", shown, "a place in the prompt for each picture")


def _places(contents: Iterable[Content]) -> Iterator[tuple[str, ImageFile]]:
    for index, content in enumerate(contents):
        if isinstance(content, MixedContent):
            for number, part in enumerate(content.parts):
                if isinstance(part, ImageFile):
                    yield f"messages[{index}].content[{number}]", part


def placed(request: Request, images: Sequence[EncodedImage], image_input: ImageInput) -> Request:
    """Returns the request with its images; its prompt has one placeholder for each."""
    ids, spans = expanded(request.prompt_ids, images, image_input)
    return dataclasses.replace(request, prompt_ids=ids, images=spans)


def expanded(
    prompt_ids: Sequence[int], images: Sequence[EncodedImage], image_input: ImageInput
) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    """Returns a prompt with as many placeholders for each image as it has tokens, and where these are."""
    spans: list[ImageSpan] = []
    ids: list[int] = []
    begin = 0
    for image in images:
        place = prompt_ids.index(image_input.placeholder_id, begin)
        ids += prompt_ids[begin:place]
        spans.append(ImageSpan(len(ids), image.num_tokens, image.digest, image.grid, image.embeddings, image.rows))
        ids += [image_input.placeholder_id] * image.num_tokens
        begin = place + 1
    ids += prompt_ids[begin:]
    return tuple(ids), tuple(spans)
