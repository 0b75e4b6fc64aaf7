"""Tokens on their way from one replica to the ingress replicas, and whose clients read.

``TokenOutbox`` numbers the tokens for one ingress replica and repeats them until they are acknowledged,
``TokenChannel`` decides when its long poll is answered, ``TokenChannels`` has one for each ingress replica.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Sequence

from actors.runtime.peer import wait_for
from core.messages.tokens import TokenBatch, TokenBatches, TokenDelta, TokenPoll

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

POLL_TIMEOUT_S = 1.0
"""An idle long poll answers after this time, so that both sides know the other lives."""

SILENCE_S = 2.0
"""An ingress replica that has not polled for this long may have died: it is found out."""

FORGET_S = 60.0
"""After this silence what is kept for an ingress replica without requests here is dropped, its last words too: it
hears of them from the Router. Its channel stays, for its numbers go on."""


class TokenOutbox:
    """Tokens that one ingress replica has not acknowledged. A lost reply loses nothing: the next poll repeats it."""

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
        """Drops all batches up to ``ack_seq``, which the ingress has."""
        while self._sealed and self._sealed[0].seq <= ack_seq:
            self._num_sealed -= len(self._sealed.popleft().deltas)

    def clear(self) -> None:
        """Drops everything; the numbers go on, so that an ingress that still polls takes the next batch."""
        self._fresh.clear()
        self._sealed.clear()
        self._num_sealed = 0

    def take(self) -> TokenBatches:
        """Everything unacknowledged, with the new deltas as one batch at the end."""
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


class TokenChannels:
    """One channel an ingress replica, from the first word to it or of it."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._channels: dict[str, TokenChannel] = {}
        self._slow: dict[str, frozenset[str]] = {}

    def put(self, ingress_id: str, deltas: list[TokenDelta], num_rows: int) -> None:
        """Queues deltas of some of ``num_rows`` sequences that run."""
        self._channel(ingress_id).put(deltas, num_rows)

    def hear(self, poll: TokenPoll) -> bool:
        """What a poll says, before it is answered; whether others may have to rest now than before."""
        channel, slow = self._channel(poll.ingress_id), frozenset(poll.slow)
        changed = channel.full or slow != self._slow.get(poll.ingress_id, frozenset())
        channel.acknowledge(poll.ack_seq)
        self._slow[poll.ingress_id] = slow
        return changed

    async def answer(self, poll: TokenPoll) -> TokenBatches:
        """The next tokens, when there are any."""
        return await self._channel(poll.ingress_id).poll(POLL_TIMEOUT_S)

    def rests(self, ingress_id: str, request_id: str) -> bool:
        """Whether a request's tokens are not being taken, so that it should bring no more."""
        return request_id in self._slow.get(ingress_id, ()) or self._channel(ingress_id).full

    def stalled(self) -> dict[str, Collection[str] | None]:
        """By ingress replica the requests whose tokens are not being taken; None for all of its requests."""
        slow: dict[str, Collection[str] | None] = {each: ids for each, ids in self._slow.items() if ids}
        return slow | {ingress_id: None for ingress_id, channel in self._channels.items() if channel.full}

    def silent(self, owners: Collection[str]) -> list[str]:
        """Returns those of these ingress replicas that may have died, and drops what is kept for others long silent."""
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
