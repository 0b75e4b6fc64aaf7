"""What has come for one client and has not been read."""

from __future__ import annotations

import asyncio

from core.deltas import joined
from core.messages.tokens import TokenDelta


class Mailbox:
    """Deltas of one stream; those that wait together are read as one, for each component that is sent has its price."""

    def __init__(self) -> None:
        self._deltas: list[TokenDelta] = []
        self._failure: Exception | None = None
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._deltas)

    def put(self, delta: TokenDelta) -> None:
        self._deltas.append(delta)
        self._filled.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream behind what is in it."""
        self._failure = error
        self._filled.set()

    async def take(self) -> TokenDelta:
        """All that has come, but what tells of a failure by itself.

        Raises:
            Exception: What ``fail`` was called with.
        """
        await self._filled.wait()
        deltas, self._deltas = self._deltas, []
        if not deltas:
            assert self._failure is not None
            raise self._failure
        if len(deltas) > 1 and deltas[-1].error is not None:
            self._deltas.append(deltas.pop())
        if not self._deltas and self._failure is None:
            self._filled.clear()
        return deltas[0] if len(deltas) == 1 else joined(deltas)
