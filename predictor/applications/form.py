"""The form of a text: its kinds of characters. It needs no training and keeps no word.

Within one application inputs differ in kind, and outputs with them: code has brackets and line breaks, a table has
digits, another script has other bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from core.forecast import ForecastQuestion
from predictor.features import Floats

READ_CHARS = 4096
"""Most characters that are read of a text, for its form and for its key: bounds the time of a forecast."""

KINDS = (
    "\n\r",
    " \t",
    "0123456789",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    ".!?",
    "{}()[]<>=;+*/\\_|&%#@$^~",
    ",:\"'`-",
    bytes(range(128, 256)).decode("latin-1"),
)
"""Kinds of bytes in UTF-8: line breaks, blanks, digits, capitals, ends of sentences, signs of code, other punctuation,
and bytes that are not ASCII. The rest are small letters."""

NUM_FORM_FEATURES = 1 + len(KINDS)
"""Length of the text in characters, and the share of each kind among the bytes that were read."""


def form_features(questions: Sequence[ForecastQuestion]) -> Floats:
    """Reads the form of each user input, or else of its instruction; shape (rows, NUM_FORM_FEATURES)."""
    return np.array([_form(each.user_input or each.instruction) for each in questions], np.float32).reshape(
        -1, NUM_FORM_FEATURES
    )


def _table() -> NDArray[np.int64]:
    kind_of = np.zeros(256, np.int64)
    for kind, members in enumerate(KINDS, 1):
        kind_of[list(members.encode("latin-1"))] = kind
    return kind_of


_KIND_OF = _table()


def _form(text: str) -> list[float]:
    read = np.frombuffer(text[:READ_CHARS].encode("utf-8", "surrogatepass"), np.uint8)
    counts = np.bincount(_KIND_OF[read], minlength=1 + len(KINDS))
    return [len(text), *(counts[1:] / max(len(read), 1))]
