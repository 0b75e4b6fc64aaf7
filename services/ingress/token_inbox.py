"""The ingress's end of the token path from one worker life: each delta exactly once and in order."""

from __future__ import annotations

from core.messages.tokens import TokenBatches, TokenDelta


class TokenInbox:
    """Takes replies in whatever order and however often they come; the mirror of the worker's ``TokenOutbox``.

    One for each connection to a worker: it belongs to the life that answers first and begins with the first batch
    that this one still has.
    """

    def __init__(self) -> None:
        self.incarnation = ""
        self._ack_seq: int | None = None

    @property
    def ack_seq(self) -> int:
        """The last batch received; a reply holds all after the last one acknowledged, so there are none missing."""
        return self._ack_seq or 0

    def receive(self, reply: TokenBatches) -> list[TokenDelta]:
        """The deltas of this reply that are new."""
        self.incarnation = self.incarnation or reply.worker_incarnation
        if reply.worker_incarnation != self.incarnation:
            return []
        deltas: list[TokenDelta] = []
        for batch in reply.batches:
            if self._ack_seq is None or batch.seq > self._ack_seq:
                self._ack_seq = batch.seq
                deltas += batch.deltas
        return deltas
