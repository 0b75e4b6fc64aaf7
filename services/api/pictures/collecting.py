"""The pictures of a chat, in their order, and whether its model can take them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from core.errors import InvalidValueError
from core.images import ImageFile
from services.api.pictures.content import MixedContent, Picture
from services.api.pictures.placing import ImageInput

Content = str | MixedContent | None


def pictures_of(contents: Iterable[Content]) -> tuple[ImageFile, ...]:
    """The files of the pictures in the contents of messages, each with the field that holds it."""
    return tuple(
        ImageFile(part.field or f"{place}.image_url.url", part.data, part.digest, part.url)
        for place, part in _places(contents)
    )


def check_pictures(contents: Iterable[Content], image_input: ImageInput | None) -> None:
    """
    Raises:
        InvalidValueError: There are pictures, and nothing sees them, or more than are taken.
    """
    for number, (place, part) in enumerate(_places(contents)):
        if image_input is None:
            raise InvalidValueError(part.field or f"{place}.type", "a picture", "'text': text alone is read here")
        if number == image_input.max_per_request:
            expected = f"at most {number} pictures in a request (images.max_per_request)"
            raise InvalidValueError(part.field or place, f"picture {number + 1}", expected)


def check_places(prompt_ids: Sequence[int], num_pictures: int, image_input: ImageInput) -> None:
    """
    Raises:
        InvalidValueError: The chat template has not made one place for each picture.
    """
    found = prompt_ids.count(image_input.placeholder_id)
    if found != num_pictures:
        shown = f"{num_pictures} pictures, for which the chat template makes {found} places"
        raise InvalidValueError("messages", shown, "a place in the prompt for each picture")


def _places(contents: Iterable[Content]) -> Iterator[tuple[str, Picture]]:
    for index, content in enumerate(contents):
        if isinstance(content, MixedContent):
            for number, part in enumerate(content.parts):
                if isinstance(part, Picture):
                    yield f"messages[{index}].content[{number}]", part
