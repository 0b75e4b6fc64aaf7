"""Pictures on their way to an ImageEncoder, and what it makes of them."""

from __future__ import annotations

from dataclasses import dataclass


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
