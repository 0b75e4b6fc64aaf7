"""Bounds what guessing may lose: guesses are bets, which are paid from a budget.

Estimates of how often guesses are right come too late for the first requests of another kind of task. A budget bounds
the loss of these requests, whatever the estimates say. A look is a search for guesses before a step.
"""

from __future__ import annotations

from collections.abc import Collection

ALLOWANCE = 0.006
"""Tokens that guessing may lose for each token of the steps that go by."""

FULL = 1.5
"""Most tokens that the common budget holds for a single sequence in flight ..."""

FULL_FOR_EACH = 1 / 4
"""... and for each further one."""

OWN_FULL = 8.0
"""Most tokens that a request's own budget holds."""

KEPT = 0.5
"""Share of the common budget that a request's guesses in one step leave, so that several guesses can be wrong."""

RESERVE_FULL = 5.0
"""Most tokens of the reserve, as a multiple of those of the common budget."""

TRICKLE = 0.3
"""Tokens that move from the reserve to the common budget, if it has room, for each token of the steps that go by."""

BARREN = 0.8
"""Share of the reserve that is left after a look without a guess worth its price."""


class GuessBudget:
    """Tokens that guesses may still cost: a common budget, and one for each request from its own right guesses.

    A token is worth the time that a sequence waits for one. The common budget receives ``ALLOWANCE`` for each token, up
    to a limit of little more than one token; it pays for the looks and for the first guesses of each request. Tokens
    won by right guesses fill the common budget first. The rest goes both to the request's own budget, which pays for
    its further guesses, and to a reserve, which refills the common budget faster while requests repeat themselves.

    So a copy is guessed in growing strides, and a request loses at most what it has won plus the common budget. After a
    change of task all requests together lose at most the allowance, a common budget and a reserve; each look that finds
    nothing takes a fifth of the reserve.
    """

    def __init__(self) -> None:
        self._common = FULL
        self._reserve = 0.0
        self._own: dict[str, float] = {}

    @property
    def common(self) -> float:
        """Tokens that any request may bet; below 0 after a look that cost more than the budget held."""
        return self._common

    @property
    def owners(self) -> Collection[str]:
        """The requests with budgets of their own."""
        return self._own.keys()

    @staticmethod
    def full(num_seqs: int) -> float:
        """Returns the most tokens that the common budget holds while ``num_seqs`` sequences are in flight."""
        return FULL + FULL_FOR_EACH * (num_seqs - 1)

    def left(self, request_id: str) -> float:
        """Returns the tokens that a request may lose."""
        return self._common + self._own.get(request_id, 0.0)

    def most_guesses(self, request_id: str, price: float) -> int:
        """Returns how many guesses of this price a request may bet in a step: at least one if it can pay for one."""
        left = self.left(request_id)
        if left < price:
            return 0
        return max(1, int((left - max(0.0, self._common) * KEPT) / price))

    def steps_until(self, common: float, num_seqs: int) -> int:
        """Returns the least number of steps of ``num_seqs`` sequences until the common budget holds ``common``."""
        rate = ALLOWANCE + TRICKLE if self._reserve > 0 else ALLOWANCE
        return max(0, int((min(common, self.full(num_seqs)) - self._common) / (rate * num_seqs)))

    def earn(self, num_seqs: int, num_steps: int = 1) -> None:
        """Adds the allowance of steps of ``num_seqs`` sequences, and moves tokens from the reserve."""
        tokens = num_seqs * num_steps
        full = self.full(num_seqs)
        self._common += max(0.0, min(ALLOWANCE * tokens, full - self._common))
        moved = max(0.0, min(self._reserve, TRICKLE * tokens, full - self._common))
        self._common += moved
        self._reserve -= moved

    def pay(self, request_id: str, tokens: float) -> None:
        """Takes the price of a request's guesses, from its own budget first."""
        own = self._own.pop(request_id, 0.0)
        if own > tokens:
            self._own[request_id] = own - tokens
        else:
            self._common -= tokens - own

    def pay_look(self, tokens: float, *, barren: bool) -> None:
        """Takes what the looks of a step have cost.

        Args:
            barren: The looks found no guess worth its price.
        """
        self._common -= tokens
        if barren:
            self._reserve *= BARREN

    def win(self, request_id: str, tokens: int, num_seqs: int) -> None:
        """Books ``tokens`` that came because guesses for a request were right."""
        to_common = min(float(tokens), max(0.0, self.full(num_seqs) - self._common))
        self._common += to_common
        if tokens > to_common:
            rest = tokens - to_common
            self._own[request_id] = min(OWN_FULL, self._own.get(request_id, 0.0) + rest)
            self._reserve = min(RESERVE_FULL * self.full(num_seqs), self._reserve + rest)

    def keep(self, request_ids: Collection[str]) -> None:
        """Forgets the budgets of all other requests."""
        self._own = {request_id: own for request_id, own in self._own.items() if request_id in request_ids}
