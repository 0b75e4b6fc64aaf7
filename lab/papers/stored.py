"""Rows of reproductions as the repository keeps them: what ``python -m lab.reproduce NAME --json`` printed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lab.reproduce.papers import Paper, PaperFigure

DOCS = Path(__file__).parents[2] / "docs"
ROWS = DOCS / "papers" / "rows"

VERDICTS = ("ok, printed", "ok, range", "ok, order", "ok, own", "fitted", "off", "open", "exempt")
"""Agreements are told apart by what they agree with."""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One printed row; see ``lab.reproduce.rows.Row``.

    Attributes:
        reported: A number, or both ends of a range, of which one may be missing; None without a printed figure.
        expected: The same for a figure of this project.
        ours: None if it was not measured.
    """

    setting: str
    metric: str
    basis: str
    reported: float | list[float | None] | None
    expected: float | list[float | None] | None
    ours: float | None
    verdict: str
    note: str

    @property
    def kind(self) -> str:
        """One of ``VERDICTS``."""
        return f"ok, {self.basis}" if self.verdict == "ok" else self.verdict


@cache
def stored(reproduction: str) -> tuple[StoredRow, ...]:
    """The rows of a reproduction.

    Raises:
        FileNotFoundError: None are kept.
    """
    lines = (ROWS / f"{reproduction}.jsonl").read_text("utf-8").splitlines()
    return tuple(_row(json.loads(line)) for line in lines)


def _row(fields: dict[str, Any]) -> StoredRow:
    return StoredRow(**{name: fields[name] for name in StoredRow.__dataclass_fields__})


def rows_of(figure: PaperFigure) -> tuple[StoredRow, ...]:
    """The rows of a figure; none where nothing runs it."""
    return tuple(row for row in stored(figure.reproduction) if figure.shows(row.setting)) if figure.reproduction else ()


def digest(figure: PaperFigure) -> str:
    """Tells whether a picture was drawn from these rows."""
    return hashlib.sha256(repr(rows_of(figure)).encode()).hexdigest()[:16]


def picture(paper: Paper, figure: PaperFigure) -> str:
    """Path of the figure's picture under ``docs``."""
    return f"papers/{Path(paper.page).stem.removeprefix('results_')}_{figure.key}.svg"
