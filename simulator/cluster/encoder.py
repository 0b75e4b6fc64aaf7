"""The image encoder of a simulated service: a resource of its own beside the replicas.

As on a server, a request is handed to the scheduler over replicas when the rows of its pictures are there; until then
it is in no queue, and steps of other requests go on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from simulator.traffic.pictures import SimImage


class ImageEncoder:
    """Encodes pictures one after the other in the order in which they come, and keeps the rows of the latest.

    The price is linear in tokens, so batches of pictures would take as long and only end later.

    Args:
        encode_s: Seconds of a picture, by its tokens.
        cache_tokens: Image tokens whose rows are kept; the least recently used go first.
    """

    def __init__(self, encode_s: Callable[[int], float], cache_tokens: int) -> None:
        self._encode_s = encode_s
        self._cache_tokens = cache_tokens
        self._kept: OrderedDict[tuple[str, int], float] = OrderedDict()  # name and tokens -> instant of its rows
        self._num_kept = 0
        self._free_at = 0.0
        self.num_encoded = 0
        self.num_found = 0
        self.busy_s = 0.0

    def encode(self, images: Sequence[SimImage], now: float) -> float:
        """The instant at which the rows of all these pictures are there; calls come in order of time. O(pictures)."""
        return max((self._rows_at(image, now) for image in images), default=now)

    def _rows_at(self, image: SimImage, now: float) -> float:
        key = image.name, image.tokens
        if image.name and key in self._kept:
            self._kept.move_to_end(key)
            self.num_found += 1
            return max(now, self._kept[key])
        seconds = self._encode_s(image.tokens)
        self.num_encoded += 1
        self.busy_s += seconds
        self._free_at = max(self._free_at, now) + seconds
        if image.name:
            self._keep(key, self._free_at)
        return self._free_at

    def _keep(self, key: tuple[str, int], rows_at: float) -> None:
        self._kept[key] = rows_at
        self._num_kept += key[1]
        while self._num_kept > self._cache_tokens:
            (_, tokens), _ = self._kept.popitem(last=False)
            self._num_kept -= tokens
