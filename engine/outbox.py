"""Tokens on their way to one ingress replica: numbered, repeated until acknowledged."""

from __future__ import annotations

from collections import deque

from core.messages.tokens import TokenBatch, TokenBatches, TokenDelta


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
