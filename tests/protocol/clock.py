"""Virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Runs what is due, in order of time and then of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Action]] = []

    def at(self, time: float, action: Action) -> None:
        heapq.heappush(self._due, (time, next(self._order), action))

    def after(self, delay_s: float, action: Action) -> None:
        heapq.heappush(self._due, (self.now + delay_s, next(self._order), action))

    def step(self) -> None:
        """Does the next thing."""
        self.now, _, action = heapq.heappop(self._due)
        action()
