"""The worker's end of the token path to one ingress replica: an outbox and when its long poll is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from core.codec import encode
from core.messages import TokenDelta
from engine.outbox import TokenOutbox

FLUSH_INTERVAL_S = 0.012
"""Replies are at least this far apart once more than ``FEW_ROWS`` run: a call costs as much as many tokens."""

FEW_ROWS = 4
"""Up to this many sequences in a step every token goes at once."""


class TokenChannel:
    """Tokens for one ingress replica. First tokens are never held back."""

    def __init__(self, incarnation: str) -> None:
        self._outbox = TokenOutbox(incarnation)
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._replied_at = asyncio.get_running_loop().time()
        self._num_polling = 0

    def put(self, deltas: Sequence[TokenDelta], num_rows: int) -> None:
        """Queues the deltas of one step that ran ``num_rows`` sequences."""
        for delta in deltas:
            self._outbox.put(delta)
        loop = asyncio.get_running_loop()
        due_at = self._replied_at + FLUSH_INTERVAL_S
        if num_rows <= FEW_ROWS or loop.time() >= due_at or any(delta.start == 0 for delta in deltas):
            self._due.set()
        elif self._timer is None:
            self._timer = loop.call_at(due_at, self._due.set)

    @property
    def silent_s(self) -> float:
        """Seconds since the ingress replica was last heard of; 0 while it waits for an answer."""
        return 0.0 if self._num_polling else asyncio.get_running_loop().time() - self._replied_at

    async def poll(self, ack_seq: int, timeout_s: float) -> bytes:
        """The next ``TokenBatches``; what was sent but not acknowledged comes again at once."""
        self._outbox.acknowledge(ack_seq)
        if not self._outbox.has_sent:
            self._num_polling += 1
            try:
                await wait_for(self._due, timeout_s)
            finally:
                self._num_polling -= 1
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._replied_at = asyncio.get_running_loop().time()
        return encode(self._outbox.take())


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Until the event is set, but no longer than ``timeout_s``."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
