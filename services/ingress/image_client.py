"""The ingress's side of pictures: has a living ImageEncoder encode them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from farsight.actors.runtime.names import initial_counts
from farsight.actors.runtime.peer import LOOK_AGAIN_S, PeerBook, PeerLost, Site, current_counts
from farsight.actors.runtime.shared_rows import rows_directory
from farsight.core.config.images import parse_image_hosts
from farsight.core.errors import CapacityError, FarsightError, InvalidValueError
from farsight.core.images import EncodedImage, EncodeImages, ImageFile, digest_of
from farsight.core.request import Request
from farsight.engine.vision.row_files import RowHolder
from farsight.services.api.errors import ApiError, unavailable

if TYPE_CHECKING:
    from farsight.services.api.pictures.fetching import PictureFetcher

COUNTS_S = 5.0
"""Seconds between two lookups of the number of encoders."""

RETRY_AFTER_S = 2.0

BEGIN_S = 60.0
"""Seconds within which a request begins after its pictures are encoded."""

_MIB = 1 << 20


class ImageClient:
    """Sends each picture to the encoder that its content selects, so that no other encodes it again.

    Pictures that are named by a URL are fetched before.

    Args:
        site: What is served; its settings bound the pictures that wait here.
        owner: Names this client among the clients of the machine.
    """

    def __init__(self, site: Site, peers: PeerBook, owner: str) -> None:
        self._peers = peers
        self._counts = initial_counts(site.config, sees=site.sees)
        self._settings = site.config.images
        self._num_bytes = 0
        directory = rows_directory()
        self._holder = None if directory is None else RowHolder(directory, owner)

    @cached_property
    def _fetcher(self) -> PictureFetcher:
        from farsight.services.api.pictures.fetching import FetchLimits, PictureFetcher  # aiohttp: with the first URL

        settings = self._settings
        limits = FetchLimits(max_waiting_bytes=settings.max_waiting_mib * _MIB, timeout_s=settings.url_timeout_s)
        return PictureFetcher(parse_image_hosts(settings.allow_urls), limits)

    async def run(self) -> None:
        """Follows the number of encoders; never returns."""
        while True:
            self._counts = await current_counts(self._peers, self._counts)
            await asyncio.sleep(COUNTS_S)

    async def see(self, files: Sequence[ImageFile], salt: str) -> tuple[EncodedImage, ...]:
        """Returns what the model reads, as ``Generator.see``; asks an encoder that dies again when it is back."""
        wanted = [file for file in files if file.url]
        if not wanted:
            return await self._seen(files, salt)
        async with self._fetcher.fetched(wanted) as found:
            left = iter(found)
            whole = [await _with_data(file, next(left)) if file.url else file for file in files]
            return await self._seen(whole, salt)

    async def _seen(self, files: Sequence[ImageFile], salt: str) -> tuple[EncodedImage, ...]:
        with self._waiting(sum(len(file.data) for file in files)):
            try:
                async with asyncio.timeout(self._settings.wait_s):
                    images = await asyncio.gather(*(self._one(file, salt) for file in files))
            except TimeoutError as error:
                raise _unavailable(f"they were not encoded within {self._settings.wait_s:g} s") from error
        for file, image in zip(files, images, strict=True):
            if image.problem:
                raise InvalidValueError(file.field, image.found, image.problem)
        return tuple(images)

    def _held_for_request(self, image: EncodedImage) -> bool:
        """Holds an image's rows until its request has begun; returns False if they were dropped before."""
        if self._holder is None or not image.rows:
            return True
        if not self._holder.hold(image.rows):
            return False
        asyncio.get_running_loop().call_later(BEGIN_S, self._holder.release, image.rows)
        return True

    @contextlib.contextmanager
    def held(self, request: Request) -> Iterator[None]:
        """Holds the rows of a request's images.

        Raises:
            ApiError: 503: the rows are gone.
        """
        names: list[str] = []
        try:
            for name in filter(None, (image.rows for image in request.images)):
                if self._holder is None or not self._holder.hold(name):
                    raise _unavailable("what was read of them is gone")
                names.append(name)
            yield
        finally:
            for name in names:
                self._holder.release(name)  # type: ignore[union-attr]

    def close(self) -> None:
        """Releases all rows."""
        if self._holder is not None:
            self._holder.close()

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
                [image] = reply.images
                if self._held_for_request(image):
                    return image
            except PeerLost:
                await asyncio.sleep(LOOK_AGAIN_S)
                self._counts = await current_counts(self._peers, self._counts)
            except FarsightError as error:
                raise _unavailable(str(error)) from error


def _unavailable(why: str) -> ApiError:
    return unavailable(f"The pictures of this request cannot be read now: {why}.")


async def _with_data(file: ImageFile, data: bytes) -> ImageFile:
    return ImageFile(file.field, data, await asyncio.to_thread(digest_of, data))
