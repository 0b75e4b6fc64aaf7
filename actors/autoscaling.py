"""How many of a stateless piece there should be, by what queues before them."""

from __future__ import annotations

from collections.abc import Sequence

LOOK_S = 1.0
"""How often the queues are looked at."""

FULL_QUEUE = 32
"""Questions in the hands of each on average, from which on one more is wanted ..."""

FULL_FOR_S = 3.0
"""... if it is so each time for this long."""

IDLE_FOR_S = 60.0
"""After so long without any question, one fewer is wanted."""


class QueueScaler:
    """Adds one at a time while all have their hands full, and takes one away after a long idle time.

    Args:
        least: Never fewer.
        most: Never more.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._full_since: float | None = None
        self._idle_since: float | None = None

    def wanted(self, queues: Sequence[int], now: float) -> int:
        """How many there should be.

        Args:
            queues: Questions in the hands of each of those there are now; not empty.
            now: Seconds, not before that of the call before.
        """
        count = len(queues)
        self._full_since = _since(self._full_since, sum(queues) >= FULL_QUEUE * count, now)
        self._idle_since = _since(self._idle_since, not any(queues), now)
        change = _lasted(self._full_since, FULL_FOR_S, now) - _lasted(self._idle_since, IDLE_FOR_S, now)
        if change:
            self._full_since = self._idle_since = None
        return min(max(count + change, self._least), self._most)


def _since(before: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if before is None else before


def _lasted(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now - since >= seconds
