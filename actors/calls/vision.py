"""Messages to an ImageEncoder."""

from __future__ import annotations

from typing import Protocol

from actors.calls.message import message
from core.images import EncodedImages, EncodeImages


class ImageEncoderCalls(Protocol):
    """An ImageEncoder."""

    @message(long=True)
    async def encode(self, order: EncodeImages) -> EncodedImages:
        """Returns the rows of each picture, or why the picture has none."""
