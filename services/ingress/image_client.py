"""The ingress's side of pictures: has them encoded, by whichever ImageEncoder lives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from actors.runtime.names import initial_counts
from actors.runtime.peer import LOOK_AGAIN_S, PeerBook, PeerLost, Site, current_counts
from core.errors import CapacityError, FarsightError, InvalidValueError
from core.messages.images import EncodedImage, EncodeImages, ImageFile

COUNTS_S = 5.0
"""How often the number of encoders is looked up."""

RETRY_AFTER_S = 2.0
_MIB = 1 << 20


class ImageClient:
    """Asks the encoder that a picture belongs to by its content, so that no other encodes it again.

    Args:
        site: What is served; its settings bound what waits here.
    """

    def __init__(self, site: Site, peers: PeerBook) -> None:
        self._peers = peers
        self._counts = initial_counts(site.config, sees=site.sees)
        self._settings = site.config.images
        self._num_bytes = 0

    async def run(self) -> None:
        """Follows the number of encoders; never returns."""
        while True:
            self._counts = await current_counts(self._peers, self._counts)
            await asyncio.sleep(COUNTS_S)

    async def see(self, files: Sequence[ImageFile], salt: str) -> tuple[EncodedImage, ...]:
        """As ``GenerationBackend.see``: an encoder that dies is asked again when it is back."""
        with self._waiting(sum(len(file.data) for file in files)):
            try:
                async with asyncio.timeout(self._settings.wait_s):
                    images = await asyncio.gather(*(self._one(file, salt) for file in files))
            except TimeoutError as error:
                raise FarsightError(f"the pictures were not encoded within {self._settings.wait_s:g} s") from error
        for file, image in zip(files, images, strict=True):
            if image.problem:
                raise InvalidValueError(file.field, image.found, image.problem)
        return tuple(images)

    @contextlib.contextmanager
    def _waiting(self, num_bytes: int) -> Iterator[None]:
        most = self._settings.max_waiting_mib * _MIB
        if self._num_bytes and self._num_bytes + num_bytes > most:
            message = f"files of pictures that wait: {self._num_bytes} bytes, limit {most}"
            raise CapacityError(message, RETRY_AFTER_S)
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_bytes -= num_bytes

    async def _one(self, file: ImageFile, salt: str) -> EncodedImage:
        while True:
            index = int.from_bytes(file.digest[:8], "little") % max(self._counts.image_encoders, 1)
            try:
                reply = await self._peers.image_encoder(index).encode(EncodeImages((file,), salt))
                return reply.images[0]
            except PeerLost:
                await asyncio.sleep(LOOK_AGAIN_S)
                self._counts = await current_counts(self._peers, self._counts)
