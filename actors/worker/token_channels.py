"""The token paths of one replica to all ingress replicas, and whose clients read."""

from __future__ import annotations

from collections.abc import Collection

from actors.worker.token_channel import TokenChannel
from core.messages.tokens import TokenBatches, TokenDelta, TokenPoll

POLL_TIMEOUT_S = 1.0
"""An idle long poll answers after this time, so that both sides know the other lives."""

SILENCE_S = 2.0
"""An ingress replica that has not polled for this long has lost its clients: their requests are aborted."""

FORGET_S = 60.0
"""After this silence what was kept for an ingress replica is dropped; its channel stays, for its numbers go on."""


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
        """Those of these ingress replicas that have lost their clients; what is kept for others long silent goes."""
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
