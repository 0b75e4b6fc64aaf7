"""From one placeholder for each picture to as many as it has tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from core.images import EncodedImage, ImageSpan
from core.request import Request


@dataclass(frozen=True, slots=True)
class ImageInput:
    """How the served model sees.

    Attributes:
        text: What stands for a picture where a chat template takes texts alone.
        placeholder_id: The token that stands for a picture.
        max_per_request: Most pictures of one request.
    """

    text: str
    placeholder_id: int
    max_per_request: int


def placed(request: Request, images: Sequence[EncodedImage], image_input: ImageInput) -> Request:
    """The request with its images; its prompt has one placeholder for each."""
    ids, spans = expanded(request.prompt_ids, images, image_input)
    return dataclasses.replace(request, prompt_ids=ids, images=spans)


def expanded(
    prompt_ids: Sequence[int], images: Sequence[EncodedImage], image_input: ImageInput
) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    """A prompt with as many placeholders for each image as it has tokens, and where these are."""
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
