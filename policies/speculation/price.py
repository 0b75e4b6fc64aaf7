"""The price of a guessed token, measured: how much longer a step takes for each further row."""

from __future__ import annotations

import math
from dataclasses import dataclass

FIRST_PRICE = 0.3
"""Price until a step with guesses has been measured."""

LEAST_PRICE = 0.03
"""Where further rows seem to cost nothing: what it takes to guess is not measured."""

RATE = 0.02
"""Share of a step's seconds by which one measurement moves an estimate at most, once there are many."""

FIRST_RATE = 0.5
"""The same for the first measurement; in between it falls with their number."""

FULL_ERROR = 0.1
"""An error of this share of the step moves an estimate as far as any larger one: a step may have been held up."""

FORGET = 0.999
"""What a step without guesses leaves of the measured price, so that one too high for any guess is measured again."""

PLAIN_EVERY = 32
"""After so many steps with guesses one goes without, so that there is something to compare with."""

_FINE = 16
_COARSE = 8


@dataclass(slots=True)
class _Line:
    """Duration of a step: ``step_s + row_s * guesses for each sequence``, each by descent of Huber's loss.

    Steps without guesses tell ``step_s``, the others ``row_s``: were both learned from both, steps with ever the same
    number of guesses could not tell them apart.
    """

    step_s: float
    row_s: float
    num_plain: int = 0
    num_drafted: int = 0
    since_plain: int = PLAIN_EVERY

    def add(self, x: float, duration_s: float) -> None:
        """Adds a step with ``x`` guesses for each of its sequences."""
        error_s = duration_s - self.step_s - self.row_s * x
        if x:
            self.num_drafted += 1
            self.since_plain += 1
            self.row_s += _move(error_s / max(1.0, x), self.step_s, self.num_drafted) * min(1.0, x)
            self.row_s = max(0.0, self.row_s)
        else:
            self.num_plain += 1
            self.since_plain = 0
            moved_s = self.step_s + _move(error_s, self.step_s, self.num_plain)
            self.row_s *= FORGET * moved_s / self.step_s
            self.step_s = moved_s

    @property
    def ratio(self) -> float:
        return math.inf if self.since_plain >= PLAIN_EVERY else max(LEAST_PRICE, self.row_s / self.step_s)


def _move(error_s: float, step_s: float, num: int) -> float:
    share = max(-1.0, min(1.0, error_s / (FULL_ERROR * step_s)))
    return max(RATE, FIRST_RATE / num) * step_s * share


class StepPrice:
    """Steps of each number of sequences have a line of their own: a row costs much where few rows share the weights.

    ``add`` and ``ratio`` are O(1); there are as many lines as sizes of steps, from 16 on one for each eight.
    """

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        self._price = FIRST_PRICE

    def add(self, num_seqs: int, num_drafts: int, duration_s: float) -> None:
        """Books a step; ``num_drafts`` are the guesses of all its sequences together."""
        if duration_s <= 0:
            return
        x = num_drafts / num_seqs
        key = _key(num_seqs)
        line = self._lines.get(key)
        if line is None:
            step_s = duration_s / (1 + self._price * x)
            line = self._lines[key] = _Line(step_s, self._price * step_s)
        line.add(x, duration_s)
        if x:
            self._price = line.row_s / line.step_s

    def ratio(self, num_seqs: int) -> float:
        """Seconds of a guessed row, as a share of the step's seconds for each of its sequences.

        Infinity where a step without guesses has to be measured.
        """
        line = self._lines.get(_key(num_seqs))
        return math.inf if line is None else line.ratio


def _key(num_seqs: int) -> int:
    return num_seqs if num_seqs < _FINE else num_seqs - num_seqs % _COARSE
