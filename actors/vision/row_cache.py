"""The rows of pictures that an ImageEncoder keeps, by name, within a bound of bytes; drops the least recently used."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from typing import Protocol

from core.images import EncodedImage
from engine.vision.row_files import RowStore

logger = logging.getLogger(__name__)


class RowCache(Protocol):
    """Rows by the name that ``engine.vision.row_files.rows_name`` makes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        ...

    def find(self, name: str) -> EncodedImage | None:
        """Returns the rows of a picture without its digest, and marks them as most recently used."""
        ...

    def keep(self, name: str, image: EncodedImage) -> EncodedImage:
        """Keeps the rows of a picture, in place of others; returns the image as answers are to describe it."""
        ...

    def sweep(self) -> None:
        """Drops rows that no request asks for any more; called from time to time."""
        ...


class CarriedRows:
    """Rows in the memory of this process; each answer carries them.

    Args:
        max_bytes: Most bytes of all rows; 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, EncodedImage] = OrderedDict()
        self.num_bytes = 0

    def find(self, name: str) -> EncodedImage | None:
        found = self._kept.get(name)
        if found is not None:
            self._kept.move_to_end(name)
        return found

    def keep(self, name: str, image: EncodedImage) -> EncodedImage:
        """Implements ``RowCache.keep``; does not keep rows larger than the whole cache."""
        size = len(image.embeddings)
        if name not in self._kept and size <= self._max_bytes:
            self._kept[name] = image
            self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= len(dropped.embeddings)
        return image

    def sweep(self) -> None:
        """Does nothing: no rows outlive their process."""


class SharedRows:
    """Rows in files; each answer names its file.

    Args:
        store: The store in the directory that the service shares.
    """

    def __init__(self, store: RowStore) -> None:
        self._store = store

    @property
    def num_bytes(self) -> int:
        return self._store.num_bytes

    def find(self, name: str) -> EncodedImage | None:
        found = self._store.find(name)
        return None if found is None else EncodedImage(b"", found.num_tokens, found.grid, rows=name)

    def keep(self, name: str, image: EncodedImage) -> EncodedImage:
        """Implements ``RowCache.keep``; the answer carries rows that cannot be written."""
        try:
            self._store.keep(name, image.num_tokens, image.grid, image.embeddings)
        except OSError as error:
            logger.warning("rows of a picture cannot be written, and go with its request: %s", error)
            return image
        return EncodedImage(image.digest, image.num_tokens, image.grid, rows=name)

    def sweep(self) -> None:
        self._store.sweep(time.time())
