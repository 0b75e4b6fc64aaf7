"""What guessing may lose: guesses are bets, which are paid from a purse that fills slowly.

Estimates of how often guesses are right come too late for the first requests of another kind of task. A purse bounds
what they lose, whatever the estimates say.
"""

from __future__ import annotations

from collections.abc import Collection

ALLOWANCE = 0.004
"""Tokens that guessing may lose for each token of the steps that it is asked about."""

FULL = 0.8
"""Most tokens that the common purse holds for a single sequence in flight ..."""

FULL_FOR_EACH = 1 / 16
"""... and for each further one."""

OWN_FULL = 8.0
"""Most tokens that a request's own purse holds."""


class Purse:
    """Tokens that guesses may still cost: in common, and for each request what its own right guesses have brought.

    A token is worth the time that a sequence waits for one. The common purse receives ``ALLOWANCE`` for each token, up
    to a limit of about one token; it pays for the looks and for the first guesses of each request. What right guesses
    bring fills the common purse first, then the request's own, which pays for further guesses of this request. So a
    copy is guessed in growing strides, a request loses no more than it has won and the common purse holds, and all
    requests together lose no more than the allowance and one common purse.
    """

    def __init__(self) -> None:
        self._common = FULL
        self._own: dict[str, float] = {}

    def earn(self, num_tokens: int) -> None:
        """A step of so many sequences goes by."""
        self._common = min(self.full(num_tokens), self._common + ALLOWANCE * num_tokens)

    @property
    def common(self) -> float:
        """Tokens that any request may bet; below 0 after a look that cost more than there was."""
        return self._common

    @property
    def owners(self) -> Collection[str]:
        """The requests with purses of their own."""
        return self._own.keys()

    def left(self, request_id: str) -> float:
        """Tokens that a request may bet."""
        return self._common + self._own.get(request_id, 0.0)

    def pay(self, request_id: str, tokens: float) -> None:
        """Takes the price of a request's guesses, from its own purse first."""
        own = self._own.pop(request_id, 0.0)
        if own > tokens:
            self._own[request_id] = own - tokens
        else:
            self._common -= tokens - own

    def pay_look(self, tokens: float) -> None:
        """Takes what a look for guesses has cost."""
        self._common -= tokens

    def win(self, request_id: str, tokens: int, num_seqs: int) -> None:
        """So many tokens came because guesses for a request were right."""
        to_common = min(float(tokens), max(0.0, self.full(num_seqs) - self._common))
        self._common += to_common
        if tokens > to_common:
            self._own[request_id] = min(OWN_FULL, self._own.get(request_id, 0.0) + tokens - to_common)

    def keep(self, request_ids: Collection[str]) -> None:
        """Forgets the purses of all other requests."""
        self._own = {request_id: own for request_id, own in self._own.items() if request_id in request_ids}

    @staticmethod
    def full(num_seqs: int) -> float:
        """Most tokens that the common purse holds while so many sequences are in flight."""
        return FULL + FULL_FOR_EACH * (num_seqs - 1)
