"""How many pairs of ended requests their predicted works put into the right order, over the latest ends."""

from __future__ import annotations

from collections import deque

WINDOW = 200
"""Latest ends over which the share is taken."""

BESIDE = 32
"""Ends before it that each end is compared with."""

LEAST_ENDS = 50
"""With fewer ends nothing is known."""


class PairAccuracy:
    """Share of ordered pairs; a pair of equal works tells nothing, a pair of equal predictions counts half."""

    def __init__(self) -> None:
        self._beside: deque[tuple[float, float]] = deque(maxlen=BESIDE)
        self._counts: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._right, self._pairs = 0.0, 0

    @property
    def share(self) -> float | None:
        """Share of pairs in the right order, in [0, 1]; None while too few have ended."""
        return self._right / self._pairs if len(self._counts) >= LEAST_ENDS and self._pairs else None

    def observe(self, predicted: float, actual: float) -> None:
        """Records an ended request: its work as predicted at its arrival, and as it was. O(BESIDE)."""
        right, pairs = 0.0, 0
        for other_predicted, other_actual in self._beside:
            if other_actual != actual:
                pairs += 1
                if other_predicted == predicted:
                    right += 0.5
                else:
                    right += (other_predicted < predicted) == (other_actual < actual)
        self._beside.append((predicted, actual))
        if len(self._counts) == WINDOW:
            old_right, old_pairs = self._counts[0]
            self._right -= old_right
            self._pairs -= old_pairs
        self._counts.append((right, pairs))
        self._right += right
        self._pairs += pairs
