"""How many length predictors are wanted, by their queues, and how many replicas, by the predicted queue delay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from farsight.core.messages.requests import LoadSnapshot
from farsight.policies.fleet.queue_delay import queue_delay_s

LOOK_S = 1.0
"""Seconds between two looks at the queues."""

FULL_QUEUE = 32
"""One more component is wanted if each has at least so many open questions on average ..."""

FULL_FOR_S = 3.0
"""... at every look for so many seconds."""

IDLE_FOR_S = 60.0
"""One fewer is wanted after so many seconds without any open question."""

LATE_FOR_S = 3.0
"""More replicas are wanted if, at every look for so many seconds, the predicted delay was above the target."""


class ScalingBounds(Protocol):
    """Bounds of the number of replicas, as ``[model]`` has them."""

    @property
    def min_replicas(self) -> int: ...

    @property
    def max_replicas(self) -> int: ...

    @property
    def target_queue_delay_s(self) -> float: ...

    @property
    def scale_down_after_s(self) -> float: ...


class QueueScaler:
    """Adds one component at a time while all are busy, and removes one after a long idle time.

    Args:
        least: Fewest components.
        most: Most components.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._full_since: float | None = None
        self._idle_since: float | None = None

    def wanted(self, queues: Sequence[int], now: float) -> int:
        """Returns the wanted number of components.

        Args:
            queues: Open questions of each present component; not empty.
            now: Seconds, never less than in the previous call.
        """
        count = len(queues)
        self._full_since = _since(self._full_since, sum(queues) >= FULL_QUEUE * count, now)
        self._idle_since = _since(self._idle_since, not any(queues), now)
        change = _lasted(self._full_since, FULL_FOR_S, now) - _lasted(self._idle_since, IDLE_FOR_S, now)
        if change:
            self._full_since = self._idle_since = None
        return min(max(count + change, self._least), self._most)


class ReplicaScaler:
    """Adds as many replicas as bring the predicted delay to its target, and removes one after a calm time.

    A replica takes seconds to minutes to load its model, so all missing replicas are wanted at once. One replica is
    removed only if, at every look of the calm time, the others alone would have kept the predicted delay below half of
    the target. Between half the target and the target nothing changes.

    Args:
        bounds: Fewest and most replicas, the target and the calm time.
    """

    def __init__(self, bounds: ScalingBounds) -> None:
        self._bounds = bounds
        self._count = 0
        self._late_since: float | None = None
        self._calm_since: float | None = None

    def wanted(self, outlook: LoadSnapshot, count: int, now: float) -> int:
        """Returns the wanted number of replicas.

        Args:
            count: The wanted number so far. While another number takes requests, replicas are starting or leaving, and
                nothing changes.
            now: Seconds, never less than in the previous call.
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
    assert delay_s is not None, "a delay that is predicted for one number of replicas is predicted for every number"
    return delay_s > seconds


def _since(before: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if before is None else before


def _lasted(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now - since >= seconds
