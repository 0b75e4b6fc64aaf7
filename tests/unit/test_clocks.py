"""A clock that jumps moves stamps alone: people and networks set the time of day, so no duration comes from it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = ("core", "tokenization", "kvcache", "policies", "predictor", "estimator")
SHELLS = ("engine", "actors", "services")


def calls(room: str) -> Iterator[tuple[Path, ast.Call, ast.AST]]:
    """Each call of ``time.time`` in a room, with what contains it."""
    for path in (ROOT / room).rglob("*.py"):
        for parent in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for child in ast.iter_child_nodes(parent):
                if isinstance(child, ast.Call) and ast.unparse(child.func) == "time.time":
                    yield path, child, parent


@pytest.mark.parametrize("room", PURE)
def test_what_decides_has_no_clock(room: str) -> None:
    assert [path for path, *_ in calls(room)] == []


@pytest.mark.parametrize("room", SHELLS)
def test_no_duration_and_no_deadline_is_told_by_the_time_of_day(room: str) -> None:
    """Only the distance of the two clocks, by which stamps are made, is a difference that it stands in."""
    found = [
        (str(path.relative_to(ROOT)), ast.unparse(parent))
        for path, _, parent in calls(room)
        if isinstance(parent, ast.BinOp | ast.Compare) and ast.unparse(parent) != "time.time() - time.monotonic()"
    ]
    assert found == []
