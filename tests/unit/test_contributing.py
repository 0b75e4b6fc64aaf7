"""The twenty questions of CONTRIBUTING.md: each answer is a file that holds what is looked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| (.*\?) \| `([^`]+)` \| `([^`]+)` \|$", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE
)


def test_there_are_twenty_questions() -> None:
    assert len(ROWS) == 20
    assert len({file for _, file, _ in ROWS}) == 20


@pytest.mark.parametrize(("question", "file", "looked_for"), ROWS, ids=lambda value: None)
def test_the_answer_is_there(question: str, file: str, looked_for: str) -> None:
    assert looked_for in (ROOT / file).read_text("utf-8"), question
