"""The worker's end of the token path to one ingress replica: an outbox and when its long poll is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from actors.runtime.peer import wait_for
from core.messages.tokens import TokenBatches, TokenDelta
from engine.outbox import TokenOutbox

FLUSH_INTERVAL_S = 0.015
"""Replies are at least this far apart once more than ``FEW_ROWS`` run: a call costs as much as many tokens."""

FIRST_INTERVAL_S = 0.005
"""First tokens are held back for as long as this: when many requests start, one reply carries several of them."""

FEW_ROWS = 4
"""Up to this many sequences in a step every token goes at once."""

MAX_DELTAS = 16_384
"""With so many deltas unacknowledged the ingress replica's requests rest: its memory is not our queue."""

TICK_S = 1.0
"""How often the channel looks whether its ingress replica has been heard of."""


class TokenChannel:
    """Tokens for one ingress replica. First tokens do not wait for the others."""

    def __init__(self, incarnation: str) -> None:
        self._outbox = TokenOutbox(incarnation)
        self._due = asyncio.Event()
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0  # by our own account: a timer of uvloop that is due at once does not say when
        self._replied_at = 0.0
        self._num_polling = 0
        self._heard = True
        self._silent_ticks = 0
        self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def put(self, deltas: Sequence[TokenDelta], num_rows: int) -> None:
        """Queues the deltas of one step that ran ``num_rows`` sequences."""
        for delta in deltas:
            self._outbox.put(delta)
        if num_rows <= FEW_ROWS:
            self._due.set()
            return
        loop = asyncio.get_running_loop()
        has_first = any(delta.start == 0 for delta in deltas)
        due_at = self._replied_at + (FIRST_INTERVAL_S if has_first else FLUSH_INTERVAL_S)
        if loop.time() >= due_at:
            self._due.set()
        elif self._timer is None or self._timer_at > due_at:
            self._cancel_timer()
            self._timer, self._timer_at = loop.call_at(due_at, self._due.set), due_at

    @property
    def full(self) -> bool:
        """Whether the ingress replica takes tokens more slowly than they are made."""
        return self._outbox.num_deltas >= MAX_DELTAS

    @property
    def silent_s(self) -> float:
        """For how long the ingress replica has not been heard of, to ``TICK_S``.

        Counted in ticks of our own event loop and not by the clock: after a stall of this process, polls wait to
        be taken in, and the ingress must not be blamed for it.
        """
        return self._silent_ticks * TICK_S

    def close(self) -> None:
        """Ends the ticking."""
        self._ticker.cancel()

    def clear(self) -> None:
        """Drops tokens that will not be asked for any more."""
        self._outbox.clear()

    def _tick(self) -> None:
        self._silent_ticks = 0 if self._heard else self._silent_ticks + 1
        self._heard = self._num_polling > 0
        self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def acknowledge(self, ack_seq: int) -> None:
        """The ingress replica has all batches up to this one."""
        self._outbox.acknowledge(ack_seq)

    async def poll(self, timeout_s: float) -> TokenBatches:
        """The next batches; what was sent but not acknowledged comes again at once."""
        self._heard = True
        if not self._outbox.has_sent:
            self._num_polling += 1
            try:
                await wait_for(self._due, timeout_s)
            finally:
                self._num_polling -= 1
        self._due.clear()
        self._cancel_timer()
        self._replied_at = asyncio.get_running_loop().time()
        return self._outbox.take()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
