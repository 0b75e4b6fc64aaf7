"""An answer that several pages share for a moment, so that each open page costs little."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


K = TypeVar("K")


class Recent(Generic[T]):
    """Reads at most once in ``for_s`` seconds; those that ask meanwhile get the same answer. An error is not kept.

    Args:
        read: Reads the answer.
        clock: Seconds; never goes back.
    """

    def __init__(self, read: Callable[[], Awaitable[T]], for_s: float, clock: Callable[[], float] = time.monotonic):
        self._read = read
        self._for_s = for_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._known: tuple[float, T] | None = None

    def is_shared(self, now: float) -> bool:
        """Whether its answer is new enough, or being read."""
        return self._lock.locked() or (self._known is not None and now - self._known[0] < self._for_s)

    async def get(self) -> T:
        """The answer, at most ``for_s`` older than the question."""
        async with self._lock:
            now = self._clock()
            if self._known is None or now - self._known[0] >= self._for_s:
                self._known = now, await self._read()
            return self._known[1]


class RecentByKey(Generic[K, T]):
    """The same for questions that differ by a key. Answers that are too old are forgotten with the next question, and
    the oldest of more than ``most``.

    Args:
        read: Reads the answer to a key.
        clock: As for ``Recent``.
    """

    def __init__(
        self, read: Callable[[K], Awaitable[T]], for_s: float, most: int, clock: Callable[[], float] = time.monotonic
    ):
        self._read = read
        self._for_s = for_s
        self._most = most
        self._clock = clock
        self._known: dict[K, Recent[T]] = {}

    def __len__(self) -> int:
        """Answers that are kept."""
        return len(self._known)

    async def get(self, key: K) -> T:
        """The answer to this key, at most ``for_s`` older than the question."""
        now = self._clock()
        self._known = {each: recent for each, recent in self._known.items() if recent.is_shared(now)}
        if key not in self._known:
            self._known[key] = Recent(lambda: self._read(key), self._for_s, self._clock)
            while len(self._known) > self._most:
                del self._known[next(iter(self._known))]
        return await self._known[key].get()
