"""The error of a grammar that cannot be used."""

from __future__ import annotations


class GrammarRefused(ValueError):
    """A grammar that cannot be used.

    Attributes:
        reason: What is wrong.
        place: JSON pointer into the schema, where that is known; empty for the whole.
    """

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{reason} (at {place})" if place else reason)
        self.reason = reason
        self.place = place
