"""How often the steps of a worker are looked at for guesses: as often as that has paid."""

from __future__ import annotations

MOST_PAUSE = 63
"""While looking does not pay, one step in so many and one is looked at."""

FIRST_BALANCE = 0.2
"""Steps that a look is believed to save before any was booked."""

RATE = 0.05
"""Weight of one look in what looks are believed to save."""

MOST_GAIN = 2.0
"""One look is booked as having saved so many steps at most: a single long copy does not pay for a thousand looks."""


class LookPace:
    """Says which steps are looked at.

    A look costs time even where no guess comes of it, and short accidental matches bring a few right guesses that do
    not make up for that. So each look is booked with what it saved less what it and its guesses cost, and pauses grow
    while the balance is negative. A look that has paid is followed by another at once, whatever the balance: a copy
    that has begun goes on.

    Attributes:
        num_barren: Looks in a row without a guess worth it; while the balance is negative, all looks.
        pause: Steps that are not looked at now.
    """

    def __init__(self) -> None:
        self.num_barren = 0
        self.pause = 0
        self._balance = FIRST_BALANCE

    def rests(self) -> bool:
        """Whether the next step is not looked at. Each call passes one step of the pause."""
        if not self.pause:
            return False
        self.pause -= 1
        return True

    def barren(self, gain: float) -> None:
        """A look found no guess worth its price."""
        self._book(gain)
        self.num_barren += 1
        self.pause = min(self.num_barren // 2, MOST_PAUSE)

    def drafted(self, gain: float) -> None:
        """Guesses were verified.

        Args:
            gain: Steps that it has saved, less its own and its guesses' cost.
        """
        self._book(gain)
        if self._balance > 0:
            self.num_barren = 0
            return
        self.num_barren += 1
        if gain <= 0:
            self.pause = min(self.num_barren // 2, MOST_PAUSE)

    def _book(self, gain: float) -> None:
        self._balance += RATE * (min(gain, MOST_GAIN) - self._balance)
