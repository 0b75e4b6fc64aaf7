"""The price of a guessed token, measured: how much longer a step takes for each further row."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PRICE = 0.3
"""Price until a step with guesses has been measured."""

LEAST_PRICE = 0.03
"""Where further rows seem to cost nothing: what it takes to guess is not measured."""

RATE = 0.1
"""Weight of a new measurement."""

MOST_TIMES = 3.0
"""A step longer than so many times its estimate was held up, and counts as one of this length."""

FORGET = 0.999
"""What a step without guesses leaves of the measured price, so that one too high for any guess is measured again."""

_FINE = 16
_COARSE = 8


@dataclass(slots=True)
class _Line:
    """Duration of a step: ``step_s + row_s * guesses for each sequence``."""

    step_s: float
    row_s: float

    @property
    def ratio(self) -> float:
        return self.row_s / self.step_s

    def add(self, guesses: float, duration_s: float) -> None:
        """A step towards the line through the new point: normalised least mean squares."""
        predicted_s = self.step_s + self.row_s * guesses
        error_s = min(duration_s, MOST_TIMES * predicted_s) - predicted_s
        share = RATE * error_s / (1 + guesses * guesses)
        self.step_s += share
        if guesses:
            self.row_s = max(0.0, self.row_s + share * guesses)
        else:
            self.row_s *= FORGET


class StepPrice:
    """Steps of each number of sequences have a line of their own: a row costs much where few rows share the weights.

    ``add`` and ``ratio`` are O(1); there are as many lines as sizes of steps, from 16 on one for each eight.
    """

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        self._latest: _Line | None = None

    def add(self, num_seqs: int, num_drafts: int, duration_s: float) -> None:
        """Books a step; ``num_drafts`` are the guesses of all its sequences together."""
        if duration_s <= 0:
            return
        key = _key(num_seqs)
        guesses = num_drafts / num_seqs
        line = self._lines.get(key)
        if line is None:
            ratio = FIRST_PRICE if self._latest is None else self._latest.ratio
            step_s = duration_s / (1 + ratio * guesses)
            line = self._lines[key] = _Line(step_s, ratio * step_s)
        else:
            line.add(guesses, duration_s)
        self._latest = line

    def ratio(self, num_seqs: int) -> float:
        """Seconds of a guessed row, as a share of the step's seconds for each of its sequences."""
        line = self._lines.get(_key(num_seqs), self._latest)
        return FIRST_PRICE if line is None else max(LEAST_PRICE, line.ratio)


def _key(num_seqs: int) -> int:
    return num_seqs if num_seqs < _FINE else num_seqs - num_seqs % _COARSE
