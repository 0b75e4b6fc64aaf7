"""The image encoder of a simulated service: a resource of its own beside the replicas.

As on a server, a request is handed to the scheduler over replicas when the rows of its pictures are there; until then
it is in no queue, and steps of other requests go on.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence

from farsight.core.costs import ImageCost
from farsight.simulator.traffic.workload import SimImage

MAX_BATCH = 16
"""Most pictures of a batch, as of a server's encoder."""

_Picture = tuple[str, int]
"""Its name and its tokens; a picture without a name is given one."""


class SimulatedEncoder:
    """Encodes the pictures that wait, together, in the order in which they came; keeps the rows of the latest.

    Args:
        cost: Seconds of a batch.
        cache_tokens: Image tokens whose rows are kept; the least recently used go first.

    Attributes:
        ends_at: The instant at which the batch under way is done; infinity if there is none.
        num_encoded: Pictures encoded, or under way.
        num_found: Pictures of which rows were kept, or that were already waiting or under way.
    """

    def __init__(self, cost: ImageCost, cache_tokens: int) -> None:
        self._cost = cost
        self._cache_tokens = cache_tokens
        self._kept: OrderedDict[_Picture, None] = OrderedDict()
        self._num_kept = 0
        self._waiting: deque[_Picture] = deque()
        self._batch: list[_Picture] = []
        self._awaited: dict[_Picture, list[str]] = {}  # pictures without rows -> requests that wait for them
        self._missing: dict[str, int] = {}  # pictures that a request waits for
        self.ends_at = math.inf
        self.num_encoded = 0
        self.num_found = 0
        self.busy_s = 0.0

    def submit(self, request_id: str, images: Sequence[SimImage]) -> bool:
        """Adds the pictures of a request; whether the rows of all of them are there. ``begin`` starts what waits."""
        num_missing = sum(self._asks(request_id, image, index) for index, image in enumerate(images))
        if num_missing:
            self._missing[request_id] = num_missing
        return not num_missing

    def begin(self, now: float) -> None:
        """Starts a batch of what waits, unless one is under way."""
        if self._batch or not self._waiting:
            return
        self._batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
        seconds = self._cost.encode_s([tokens for _, tokens in self._batch])
        self.busy_s += seconds
        self.ends_at = now + seconds

    def finish(self, now: float) -> list[str]:
        """Ends the batch of ``ends_at`` and starts the next one; the requests that now have all their rows."""
        ready = []
        for picture in self._batch:
            for request_id in self._awaited.pop(picture):
                self._missing[request_id] -= 1
                if not self._missing[request_id]:
                    del self._missing[request_id]
                    ready.append(request_id)
            self._keep(picture)
        self._batch = []
        self.ends_at = math.inf
        self.begin(now)
        return ready

    def _asks(self, request_id: str, image: SimImage, index: int) -> bool:
        """Whether the request has to wait for the picture."""
        picture = image.name or f"{request_id}/{index}", image.tokens
        if picture in self._kept:
            self._kept.move_to_end(picture)
            self.num_found += 1
            return False
        if picture in self._awaited:
            self.num_found += 1
        else:
            self.num_encoded += 1
            if self._cost.is_free:
                self._keep(picture)
                return False
            self._awaited[picture] = []
            self._waiting.append(picture)
        self._awaited[picture].append(request_id)
        return True

    def _keep(self, picture: _Picture) -> None:
        self._kept[picture] = None
        self._num_kept += picture[1]
        while self._num_kept > self._cache_tokens:
            (_, tokens), _ = self._kept.popitem(last=False)
            self._num_kept -= tokens
