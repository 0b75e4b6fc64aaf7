"""An answer that several pages share for a moment, so that each open page costs little."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


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

    async def get(self) -> T:
        """The answer, at most ``for_s`` older than the question."""
        async with self._lock:
            now = self._clock()
            if self._known is None or now - self._known[0] >= self._for_s:
                self._known = now, await self._read()
            return self._known[1]
