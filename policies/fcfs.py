"""First come, first served: the order of Orca and vLLM, and the baseline of every paper here."""

from __future__ import annotations

from collections.abc import Iterator


class FcfsQueue:
    """Waiting requests by arrival; a preempted one comes back to the front, before all that never ran.

    Every operation is O(1), but ``remove``, which costs one scan of a dict view in the worst case.
    """

    def __init__(self) -> None:
        self._order: dict[str, None] = {}
        self._front: dict[str, None] = {}

    def push(self, request_id: str) -> None:
        self._order[request_id] = None

    def push_front(self, request_id: str) -> None:
        self._front[request_id] = None

    def remove(self, request_id: str) -> None:
        """Takes the request out wherever it stands; unknown ids are fine."""
        self._order.pop(request_id, None)
        self._front.pop(request_id, None)

    def __iter__(self) -> Iterator[str]:
        """Best first: of the preempted the last one to come is the oldest, since victims go newest first."""
        yield from reversed(self._front)
        yield from self._order

    def __len__(self) -> int:
        return len(self._order) + len(self._front)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._order or request_id in self._front
