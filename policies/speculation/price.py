"""The price of a guessed token, measured: how much longer a step takes for each further row."""

from __future__ import annotations

import math
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
