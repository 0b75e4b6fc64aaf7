"""Virtual time: alarms in order of their instants."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


class Alarms(Generic[Owner]):
    """One alarm per owner; a new alarm replaces the old one. Alarms of one instant ring in the order they were set."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Owner]] = []
        self._current: dict[Owner, tuple[float, int]] = {}
        self._num_set = 0

    def set(self, who: Owner, at: float) -> None:
        """Sets the only alarm of ``who`` to this instant; infinity for never."""
        current = self._current.get(who)
        if current is not None and current[0] == at:
            return
        self._num_set += 1
        self._current[who] = (at, self._num_set)
        if at < math.inf:
            heapq.heappush(self._heap, (at, self._num_set, who))

    @property
    def next_at(self) -> float:
        """Instant of the next alarm; infinity if there is none."""
        while self._heap and self._current[self._heap[0][2]][1] != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def pop(self) -> Owner:
        """Removes the next alarm and returns its owner. Call it only after ``next_at`` returned a finite instant."""
        _, num_set, who = heapq.heappop(self._heap)
        self._current[who] = (math.inf, num_set)
        return who
