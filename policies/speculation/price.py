"""What guessing tokens costs: the measured price of a guess, and the budget that bounds what guesses may lose.

The price of a guessed token is how much longer a step takes for each further row. Guesses are bets, which are paid from
a budget: estimates of how often guesses are right come too late for the first requests of another kind of task, and a
budget bounds the loss of these requests, whatever the estimates say. A look is a search for guesses before a step.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

FIRST_PRICE = 0.3
"""Price until a step with guesses has been measured."""

LEAST_PRICE = 0.03
"""Price where further rows seem to cost nothing: the cost of guessing itself is not measured."""

RATE = 0.02
"""Share of a step's seconds by which one of many measurements moves an estimate at most."""

FIRST_RATE = 0.2
"""The same share for the first measurement; it then falls as 1 / (number of measurements)."""

FULL_ERROR = 0.1
"""An error of this share of the step moves an estimate as far as any larger error: a step may have been held up."""

FORGET = 0.99
"""Factor by which a step without guesses shrinks a measured price above ``FIRST_PRICE``: a price too high for any guess
falls until it is measured again."""

FORGOTTEN = 4
"""A price that was partly forgotten is measured again as fast as after this many measurements."""

TOO_FAST = 0.7
"""A step shorter than this share of its estimate shows that the estimate was of steps that were held up."""

PLAIN_EVERY = 32
"""Steps with guesses after which one step goes without, so that there is a step to compare with."""

_FINE = 16
_COARSE = 8


@dataclass(slots=True)
class _Steps:
    """Steps without guesses of one size.

    Attributes:
        step_s: Seconds of one.
        num: Number of measured steps.
        since: Steps with guesses since the latest step without.
    """

    step_s: float
    num: int = 0
    since: int = 0


class StepPrice:
    """Learns the seconds of a step of each size from steps without guesses, the seconds of a further row from the rest.

    If both were learned from all steps, steps with always the same number of guesses could not tell them apart. The
    seconds of a row hold for all sizes of steps; its price does not, since many sequences share a step's fixed cost.

    ``add`` and ``ratio`` are O(1); there is one entry for each size of steps, from 16 on one for each eight sizes.
    """

    def __init__(self) -> None:
        self._steps: dict[int, _Steps] = {}
        self._row_s = -1.0  # below 0 while nothing is known
        self._num_drafted = 0

    def add(self, num_seqs: int, num_drafts: int, duration_s: float) -> None:
        """Books a step; ``num_drafts`` are the guesses of all its sequences together."""
        if duration_s <= 0:
            return
        steps = self._steps.get(_key(num_seqs))
        if num_drafts:
            if steps is not None:
                steps.since += 1
                self._add_rows(num_drafts, duration_s - steps.step_s, steps.step_s / num_seqs)
            return
        if steps is None:
            steps = self._steps[_key(num_seqs)] = _Steps(duration_s)
        steps.num, steps.since = steps.num + 1, 0
        if duration_s < TOO_FAST * steps.step_s:
            self._row_s *= duration_s / steps.step_s  # measured while steps were held up too
            steps.step_s = duration_s
        steps.step_s += _move(duration_s - steps.step_s, steps.step_s, steps.num)
        if self._row_s * num_seqs > FIRST_PRICE * steps.step_s:
            self._row_s *= FORGET
            self._num_drafted = min(self._num_drafted, FORGOTTEN)

    def _add_rows(self, num_drafts: int, rows_s: float, token_s: float) -> None:
        """Books that ``num_drafts`` guesses took ``rows_s`` where a token of a sequence takes ``token_s``."""
        if self._row_s < 0:
            self._row_s = FIRST_PRICE * token_s
        self._num_drafted += 1
        row_s = self._row_s + _move(rows_s / num_drafts - self._row_s, token_s, self._num_drafted)
        self._row_s = max(0.0, row_s)

    def ratio(self, num_seqs: int) -> float:
        """Returns the seconds of a guessed row, as a share of the step's seconds for each of its sequences.

        Infinity where a step without guesses has to be measured.
        """
        steps = self._steps.get(_key(num_seqs))
        if steps is None or steps.since >= PLAIN_EVERY:
            return math.inf
        return self._price(num_seqs, steps.step_s)

    def tokens(self, num_seqs: int, seconds: float) -> float:
        """Returns the tokens that steps of ``num_seqs`` sequences bring in this time; 0 before one was measured."""
        steps = self._steps.get(_key(num_seqs))
        return 0.0 if steps is None else seconds / steps.step_s * num_seqs

    def _price(self, num_seqs: int, step_s: float) -> float:
        return FIRST_PRICE if self._row_s < 0 else max(LEAST_PRICE, self._row_s * num_seqs / step_s)


def _move(error_s: float, scale_s: float, num: int) -> float:
    """Returns how far, in seconds, the ``num``-th measurement moves an estimate that is off by ``error_s``."""
    share = max(-1.0, min(1.0, error_s / (FULL_ERROR * scale_s)))
    return max(RATE, FIRST_RATE / num) * scale_s * share


def _key(num_seqs: int) -> int:
    return num_seqs if num_seqs < _FINE else num_seqs - num_seqs % _COARSE


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
