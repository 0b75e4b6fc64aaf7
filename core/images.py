"""Images in a prompt: which of its tokens stand for one, and what the model reads in their place.

An image is a run of one placeholder token in ``Request.prompt_ids``. The ingress writes as many of them as the
model's geometry says (``engine.vision.geometry``), an encoder turns the picture into as many rows
(``engine.vision.model``), and the engine reads these rows in place of the placeholder's embedding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from farsight.core.errors import InvalidValueError

MAX_DIGEST = 64
"""Longest digest of an image, in bytes."""

_ID_BYTES = 4
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """One image of a prompt.

    Attributes:
        start: Index in ``prompt_ids`` of its first token.
        length: Its tokens, all of them the model's placeholder.
        digest: Names its content, 8 to ``MAX_DIGEST`` bytes: equal pictures that were prepared alike have equal ones.
            Requests share data by it, such as the KV of their beginnings.
        grid: Rows and columns of its tokens, for models whose positions have axes; empty for any other.
        embeddings: ``length`` rows of the model's hidden size, one behind the other, little-endian: float32, or
            bfloat16, which the number of bytes tells apart. Empty where the worker gets them in another way
            (``engine.vision.spans.FindRows``).
        rows: Name of the file of its rows, where processes share them (``engine.vision.row_files``).
    """

    start: int
    length: int
    digest: bytes
    grid: tuple[int, ...] = ()
    embeddings: bytes = b""
    rows: str = ""

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 1:
            raise InvalidValueError("images", (self.start, self.length), "a start >= 0 and at least one token")
        if not 8 <= len(self.digest) <= MAX_DIGEST:
            raise InvalidValueError("images.digest", len(self.digest), f"8 to {MAX_DIGEST} bytes")
        if self.grid and (len(self.grid) != 2 or min(self.grid) < 1 or math.prod(self.grid) != self.length):
            raise InvalidValueError("images.grid", self.grid, f"rows and columns of {self.length} tokens, or nothing")

    @property
    def end(self) -> int:
        """Index behind its last token."""
        return self.start + self.length


def digest_of(data: bytes) -> bytes:
    """Names a file of a picture by its content."""
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def check_spans(images: Sequence[ImageSpan], prompt_len: int) -> None:
    """
    Raises:
        InvalidValueError: Images that overlap, do not ascend, or reach beyond the prompt.
    """
    reached = 0
    for index, image in enumerate(images):
        if image.start < reached or image.end > prompt_len:
            expected = f"ascending images that do not overlap, within the {prompt_len} tokens of the prompt"
            raise InvalidValueError(f"images[{index}]", (image.start, image.end), expected)
        reached = image.end


def identity_ids(prompt_ids: Sequence[int], images: Sequence[ImageSpan]) -> tuple[int, ...]:
    """Returns the numbers that name the prompt's blocks (``kvcache.block_manager``): one for each token.

    A text token has its id. An image's token has a 32-bit number derived from the image's digest, so that only equal
    pictures make equal beginnings.
    """
    if not images:
        return tuple(prompt_ids)
    named = list(prompt_ids)
    for image in images:
        content = blake2b(image.digest + bytes(str(image.grid), "ascii"), digest_size=_ID_BYTES * 8).digest()
        ids = [int.from_bytes(content[at : at + _ID_BYTES], "little") for at in range(0, len(content), _ID_BYTES)]
        # Each number depends on the token's place in the image, so that even blocks of one token tell the places apart.
        for place in range(image.length):
            named[image.start + place] = (ids[place % len(ids)] + place) % (1 << 32)
    return tuple(named)


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A picture as its client sent it.

    Attributes:
        field: Where it stands in the request, for errors.
        data: A file of any format that is read.
        digest: Names the file (``digest_of``).
        url: Where the ingress fetches it from; empty where the file is here, as it is for an ImageEncoder.
    """

    field: str
    data: bytes
    digest: bytes
    url: str = ""


@dataclass(frozen=True, slots=True)
class EncodeImages:
    """Ingress -> ImageEncoder: encode these.

    Attributes:
        salt: Only requests of the same salt share a picture's kept rows.
    """

    files: tuple[ImageFile, ...]
    salt: str


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """One picture as a model reads it.

    Attributes:
        digest, grid, embeddings, rows: As of ``core.images.ImageSpan``.
        num_tokens: Number of its tokens.
        is_cached: Whether it had been encoded before.
        problem: For a picture that cannot be read: the kind of picture that was expected; all other fields are empty.
        found: For such a picture: the kind that was found.
    """

    digest: bytes
    num_tokens: int = 0
    grid: tuple[int, ...] = ()
    embeddings: bytes = b""
    rows: str = ""
    is_cached: bool = False
    problem: str = ""
    found: str = ""


@dataclass(frozen=True, slots=True)
class EncodedImages:
    """ImageEncoder -> ingress: in the order of the question."""

    images: tuple[EncodedImage, ...]
