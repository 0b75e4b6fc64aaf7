"""How many there should be: of a stateless component by what queues before it, of replicas by the predicted queue
delay."""

from __future__ import annotations

from collections.abc import Sequence

from core.config.model import ModelConfig
from core.load_snapshot import LoadSnapshot
from policies.fleet.queue_delay import queue_delay_s

LOOK_S = 1.0
"""How often the queues are looked at."""

FULL_QUEUE = 32
"""Questions in the hands of each on average, from which on one more is wanted ..."""

FULL_FOR_S = 3.0
"""... if it is so each time for this long."""

IDLE_FOR_S = 60.0
"""After so long without any question, one fewer is wanted."""

LATE_FOR_S = 3.0
"""More replicas are wanted if at each look for this long a new request would have waited too long."""


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


class ReplicaScaler:
    """Adds as many replicas as bring the predicted delay to its target, and takes one away after a calm time.

    A replica takes seconds to minutes to load its model, so those that are missing are wanted at once, but one that is
    idle is given up only where the rest would have kept to half of the target all the while, at the highest load
    that there was. Between the two nothing changes.

    Args:
        bounds: How many at least and at most, the target and the calm time.
    """

    def __init__(self, bounds: ModelConfig) -> None:
        self._bounds = bounds
        self._count = 0
        self._late_since: float | None = None
        self._calm_since: float | None = None

    def wanted(self, outlook: LoadSnapshot, count: int, now: float) -> int:
        """How many there should be.

        Args:
            count: How many there should be so far. As long as others take requests, some are starting or leaving: that
                is waited for.
            now: Seconds, not before that of the call before.
        """
        if count != self._count or outlook.num_replicas != count:
            self._count, self._late_since, self._calm_since = count, None, None
        if outlook.num_replicas != count:
            return count
        target_s = self._bounds.target_queue_delay_s
        delay_s = queue_delay_s(outlook, count)
        if delay_s is None:
            return count
        self._late_since = _since(self._late_since, delay_s > target_s, now)
        calm = count > self._bounds.min_replicas and not _exceeds(outlook, count - 1, target_s / 2)
        self._calm_since = _since(self._calm_since, calm, now)
        if _lasted(self._late_since, LATE_FOR_S, now):
            enough = (more for more in range(count, self._bounds.max_replicas) if not _exceeds(outlook, more, target_s))
            return next(enough, self._bounds.max_replicas)
        return count - _lasted(self._calm_since, self._bounds.scale_down_after_s, now)


def _exceeds(outlook: LoadSnapshot, count: int, seconds: float) -> bool:
    delay_s = queue_delay_s(outlook, count)
    assert delay_s is not None, "what is predicted for one number of replicas is for another one"
    return delay_s > seconds


def _since(before: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if before is None else before


def _lasted(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now - since >= seconds
