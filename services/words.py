"""Words for people: numbers with their nouns."""

from __future__ import annotations


def counted(number: float, noun: str) -> str:
    """Returns the rounded number with its noun, in the plural unless it is 1: "1 request", "2 processes"."""
    text = f"{number:z,.0f}"  # z: a sum that rounding errors have left below 0 is 0, not -0
    return f"{text} {noun}{'' if text == '1' else 'es' if noun.endswith('s') else 's'}"
