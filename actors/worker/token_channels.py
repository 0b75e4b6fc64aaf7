"""Tokens on their way from one replica to the ingress replicas, and which requests' clients read.

``TokenOutbox`` numbers the tokens for one ingress replica and repeats them until they are acknowledged,
``TokenChannel`` decides when its long poll is answered, ``TokenChannels`` has one for each ingress replica.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Sequence

from farsight.actors.runtime.peer import wait_for
from farsight.core.messages.tokens import TokenBatch, TokenBatches, TokenDelta, TokenPoll

FLUSH_INTERVAL_S = 0.015
"""Fewest seconds between two replies while more than ``FEW_ROWS`` run: a call costs as much as many tokens."""

FIRST_INTERVAL_S = 0.005
"""Seconds for which first tokens are held back: when many requests start, one reply carries several first tokens."""

FEW_ROWS = 4
"""Up to this many sequences in a step every token is sent at once."""

MAX_DELTAS = 16_384
"""Unacknowledged deltas at which an ingress replica's requests pause, so that this queue stays bounded."""

TICK_S = 1.0
"""Seconds between two checks whether the ingress replica of a channel has polled."""

POLL_TIMEOUT_S = 1.0
"""Seconds after which an idle long poll is answered, so that both sides know the other lives."""

SILENCE_S = 2.0
"""Seconds without a poll after which an ingress replica may have died; Ray is then asked."""

FORGET_S = 60.0
"""Seconds without a poll after which the tokens for an ingress replica without requests here are dropped, last ones
too: the ingress learns of these ends from the Router. The channel stays, so that its batch numbers go on."""


class TokenOutbox:
    """Tokens that one ingress replica has not acknowledged. The next poll repeats a lost reply."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._seq = 0
        self._fresh: list[TokenDelta] = []
        self._sealed: deque[TokenBatch] = deque()
        self._num_sealed = 0

    def put(self, delta: TokenDelta) -> None:
        self._fresh.append(delta)

    @property
    def num_deltas(self) -> int:
        """Deltas that the ingress replica has not acknowledged."""
        return self._num_sealed + len(self._fresh)

    @property
    def has_sent(self) -> bool:
        """Whether a batch was sent and not acknowledged."""
        return bool(self._sealed)

    def acknowledge(self, ack_seq: int) -> None:
        """Drops all batches up to ``ack_seq``, which the ingress replica has received."""
        while self._sealed and self._sealed[0].seq <= ack_seq:
            self._num_sealed -= len(self._sealed.popleft().deltas)

    def clear(self) -> None:
        """Drops everything; batch numbers go on, so that an ingress replica that still polls takes the next batch."""
        self._fresh.clear()
        self._sealed.clear()
        self._num_sealed = 0

    def take(self) -> TokenBatches:
        """Returns all unacknowledged batches, with the new deltas as one batch at the end."""
        if self._fresh:
            self._seq += 1
            self._sealed.append(TokenBatch(self._incarnation, self._seq, tuple(self._fresh)))
            self._num_sealed += len(self._fresh)
            self._fresh = []
        return TokenBatches(self._incarnation, tuple(self._sealed))


class TokenChannel:
    """Tokens for one ingress replica. First tokens do not wait for the others."""

    def __init__(self, incarnation: str) -> None:
        self._outbox = TokenOutbox(incarnation)
        self._due = asyncio.Event()
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0  # kept here: a timer of uvloop that is due at once has no time
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
        """Seconds for which the ingress replica has not polled, in multiples of ``TICK_S``.

        Counted in ticks of this event loop and not by the clock: after a stall of this process, polls are waiting to
        be read, and the ingress replica must not be blamed for the stall.
        """
        return self._silent_ticks * TICK_S

    def close(self) -> None:
        """Stops the timer that counts silence."""
        self._ticker.cancel()

    def clear(self) -> None:
        """Drops tokens that the ingress replica will not fetch any more."""
        self._outbox.clear()

    def _tick(self) -> None:
        self._silent_ticks = 0 if self._heard else self._silent_ticks + 1
        self._heard = self._num_polling > 0
        self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def acknowledge(self, ack_seq: int) -> None:
        """Drops all batches up to ``ack_seq``, which the ingress replica has received."""
        self._outbox.acknowledge(ack_seq)

    async def poll(self, timeout_s: float) -> TokenBatches:
        """Returns the next batches; batches that were sent and not acknowledged come again at once."""
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


class TokenChannels:
    """One channel for each ingress replica, from the first token for it or poll of it."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._channels: dict[str, TokenChannel] = {}
        self._slow: dict[str, frozenset[str]] = {}

    def put(self, ingress_id: str, deltas: list[TokenDelta], num_rows: int) -> None:
        """Queues deltas of some of the ``num_rows`` running sequences."""
        self._channel(ingress_id).put(deltas, num_rows)

    def hear(self, poll: TokenPoll) -> bool:
        """Takes in a poll before it is answered; returns whether the set of paused requests may have changed."""
        channel, slow = self._channel(poll.ingress_id), frozenset(poll.slow)
        changed = channel.full or slow != self._slow.get(poll.ingress_id, frozenset())
        channel.acknowledge(poll.ack_seq)
        self._slow[poll.ingress_id] = slow
        return changed

    async def answer(self, poll: TokenPoll) -> TokenBatches:
        """Returns the next tokens, when there are any; none after ``POLL_TIMEOUT_S``."""
        return await self._channel(poll.ingress_id).poll(POLL_TIMEOUT_S)

    def rests(self, ingress_id: str, request_id: str) -> bool:
        """Returns whether a request must pause because its tokens are not being taken."""
        return request_id in self._slow.get(ingress_id, ()) or self._channel(ingress_id).full

    def stalled(self) -> dict[str, Collection[str] | None]:
        """Returns by ingress replica the requests whose tokens are not being taken; None for all of its requests."""
        slow: dict[str, Collection[str] | None] = {each: ids for each, ids in self._slow.items() if ids}
        return slow | {ingress_id: None for ingress_id, channel in self._channels.items() if channel.full}

    def silent(self, owners: Collection[str]) -> list[str]:
        """Returns which of ``owners`` may have died, and drops tokens for other ingress replicas long silent."""
        for ingress_id, channel in self._channels.items():
            if channel.silent_s > FORGET_S and ingress_id not in owners:
                channel.clear()
                self._slow.pop(ingress_id, None)
        return [ingress_id for ingress_id in owners if self._channel(ingress_id).silent_s >= SILENCE_S]

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _channel(self, ingress_id: str) -> TokenChannel:
        if ingress_id not in self._channels:
            self._channels[ingress_id] = TokenChannel(self._incarnation)
        return self._channels[ingress_id]
