"""What an ImageEncoder keeps of pictures: rows by content, within a bound of bytes; the longest unused go first."""

from __future__ import annotations

from collections import OrderedDict

from core.messages.images import EncodedImage

Key = tuple[str, bytes]
"""Salt and digest: who shares no salt shares no picture."""


class RowCache:
    """
    Args:
        max_bytes: Of the rows; 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Key, EncodedImage] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: Key) -> EncodedImage | None:
        """The rows of a picture, which are the latest used from now on."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def keep(self, key: Key, image: EncodedImage) -> None:
        """Keeps a picture if it fits at all, in place of others."""
        size = len(image.embeddings)
        if key in self._kept or size > self._max_bytes:
            return
        self._kept[key] = image
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= len(dropped.embeddings)
