"""The ingress's end of the token path from one worker: each delta exactly once and in order."""

from __future__ import annotations

from core.messages import TokenBatches, TokenDelta


class TokenInbox:
    """Takes replies in whatever order and however often they come; the mirror of ``engine.outbox.TokenOutbox``.

    A worker that begins a new life numbers its batches anew.
    """

    def __init__(self) -> None:
        self._incarnation = ""
        self._ack_seq = 0

    @property
    def ack_seq(self) -> int:
        """The last batch received without a gap; the worker need not send it again."""
        return self._ack_seq

    def receive(self, reply: TokenBatches) -> list[TokenDelta]:
        """The deltas of this reply that are new."""
        deltas: list[TokenDelta] = []
        for batch in reply.batches:
            if batch.worker_incarnation != self._incarnation:
                self._incarnation, self._ack_seq = batch.worker_incarnation, 0
            if batch.seq == self._ack_seq + 1:
                self._ack_seq = batch.seq
                deltas += batch.deltas
        return deltas
