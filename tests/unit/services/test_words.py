"""Numbers with their nouns."""

from __future__ import annotations

import pytest

from services.words import counted


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "request", "1 request"),
        (0, "request", "0 requests"),
        (1.0, "token", "1 token"),
        (1024, "token", "1,024 tokens"),
        (-1e-13, "token", "0 tokens"),
        (2, "process", "2 processes"),
        (1, "process", "1 process"),
    ],
)
def test_a_number_has_its_noun(number: float, noun: str, text: str) -> None:
    assert counted(number, noun) == text
