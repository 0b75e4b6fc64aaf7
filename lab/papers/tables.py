"""The generated regions of the papers' pages, from the rows of reproductions that the repository keeps."""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from lab.reproduce.causes import cause_of
from lab.reproduce.papers import PAPERS, Paper, PaperFigure, gaps

DOCS = Path(__file__).parents[2] / "docs"
ROWS = DOCS / "papers" / "rows"
CONDITIONS = DOCS / "papers" / "conditions"
"""Rows of changed conditions, which are no results of a paper."""

VERDICTS = ("ok, printed", "ok, range", "ok, order", "ok, own", "fitted", "off", "open", "exempt")
"""Agreements are told apart by what they agree with."""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One printed row; see ``lab.reproduce.rows.Row``.

    Attributes:
        reported: A number, or both ends of a range, of which one may be missing; None without a printed figure.
        expected: The same for a figure of this project.
        ours: None if it was not measured.
        values: Ours for each draw, as far as they are kept.
    """

    setting: str
    metric: str
    basis: str
    reported: float | list[float | None] | None
    expected: float | list[float | None] | None
    ours: float | None
    verdict: str
    note: str
    values: tuple[float, ...] = field(default=(), repr=False)  # a digest of older pictures knows nothing of them

    @property
    def interval(self) -> str:
        """Ours, with two standard errors where there are draws to tell them."""
        if self.ours is None:
            return ""
        if len(self.values) < 2:
            return f"{self.ours:.4g}"
        error = 2 * statistics.stdev(self.values) / math.sqrt(len(self.values))
        return f"{self.ours:.4g} ± {error:.2g}"

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
    folder = CONDITIONS if reproduction.startswith("conditions_") else ROWS
    lines = (folder / f"{reproduction}.jsonl").read_text("utf-8").splitlines()
    return tuple(_row(json.loads(line)) for line in lines)


def _row(fields: dict[str, Any]) -> StoredRow:
    kept = {name: fields[name] for name in StoredRow.__dataclass_fields__ if name in fields}
    return StoredRow(**kept | {"values": tuple(fields.get("values", ()))})


def rows_of(figure: PaperFigure) -> tuple[StoredRow, ...]:
    """The rows of a figure; none where nothing runs it."""
    return tuple(row for row in stored(figure.reproduction) if figure.shows(row.setting)) if figure.reproduction else ()


def digest(figure: PaperFigure) -> str:
    """Tells whether a picture was drawn from these rows."""
    return hashlib.sha256(repr(rows_of(figure)).encode()).hexdigest()[:16]


def picture(paper: Paper, figure: PaperFigure) -> str:
    """Path of the figure's picture under ``docs``."""
    return f"papers/{Path(paper.page).stem.removeprefix('results_')}_{figure.key}.svg"


NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")
"""A number that stands alone: the 16 of ``16 clients``, not that of ``D1``."""

KEPT = "kept from an earlier run"
"""In the note of a row that the newest run did not reach."""


def shares_table() -> str:
    """One row a paper: how many rows have which verdict, and the share that agrees with what the paper prints."""
    all_kinds = {row.kind for paper in PAPERS for name in paper.reproductions for row in stored(name)}
    shown = [kind for kind in VERDICTS if kind in all_kinds]
    lines = [
        "| paper | rows | " + " | ".join(shown) + " | agree with printed numbers |",
        "|---" * (len(shown) + 3) + "|",
    ]
    for paper in PAPERS:
        kinds = [row.kind for name in paper.reproductions for row in stored(name)]
        printed = [row for name in paper.reproductions for row in stored(name) if row.basis in ("printed", "fitted")]
        unfitted = [row for row in printed if row.basis == "printed"]
        counts = " | ".join(str(kinds.count(kind)) for kind in shown)
        share = f"{sum(row.verdict == 'ok' for row in unfitted)} of {len(unfitted)}{_per_cent(unfitted)}"
        lines.append(f"| [{paper.name}]({paper.page}) | {len(kinds)} | {counts} | {share} |")
    return "\n".join(lines)


def _per_cent(rows: list[StoredRow]) -> str:
    return f" ({sum(row.verdict == 'ok' for row in rows) / len(rows):.0%})" if rows else ""


def gaps_table() -> str:
    """What nothing runs again."""
    lines = ["| paper | figure | why |", "|---|---|---|"]
    lines += [f"| {paper.name} | {figure.number}: {figure.what} | {figure.why} |" for paper, figure in gaps()]
    return "\n".join(lines)


def printed_table() -> str:
    """Every number and range that the papers print, ours, and for each that is missed its cause."""
    lines = ["| paper | setting | metric | printed | ours | verdict | cause |", "|---|---|---|---|---|---|---|"]
    for paper in PAPERS:
        for name in paper.reproductions:
            for row in stored(name):
                if row.basis not in ("printed", "range"):
                    continue
                cause = cause_of(name, row.setting, row.metric) if row.verdict == "off" else None
                why = "" if cause is None else f"{cause.why}: `{cause.run}`"
                cells = (paper.name, row.setting, row.metric, _shown(row.reported), row.interval, row.verdict, why)
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def conditions_tables(paper: Paper) -> str:
    """What comes out where one condition of a reproduction is changed."""
    parts = []
    for name in paper.conditions:
        lines = ["| changed | metric | printed | ours | verdict |", "|---|---|---|---|---|"]
        for row in stored(name):
            wanted = _shown(row.reported) if row.reported is not None else "order"
            lines.append(f"| {row.setting} | {row.metric} | {wanted} | {row.interval} | {row.verdict} |")
        parts.append(f"`python -m lab.reproduce {name}`:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def index_table(paper: Paper) -> str:
    """Every figure and table of a paper, its verdicts and its command."""
    lines = ["| figure | what | verdicts | command: `python -m lab.reproduce ...` |", "|---|---|---|---|"]
    for figure in paper.figures:
        link = f"[{figure.number}](#{_anchor(figure)})" if figure.reproduction else figure.number
        run = figure.command or figure.reproduction
        command = f"`{run}`" if run else ""
        lines.append(f"| {link} | {figure.what} | {_verdicts(figure)} | {command} |")
    return "\n".join(lines)


def _anchor(figure: PaperFigure) -> str:
    """As Markdown makes it from the heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", figure.number.lower())).strip("-")


def _verdicts(figure: PaperFigure) -> str:
    rows = rows_of(figure)
    kinds = [row.kind for row in rows]
    counted = [f"{kinds.count(kind)} {kind}" for kind in VERDICTS if kind in kinds]
    if kept := sum(KEPT in row.note for row in rows):
        counted.append(f"{kept} of them {KEPT}")
    return "; ".join(counted) or figure.why


def figure_section(paper: Paper, figure: PaperFigure) -> str:
    """Heading, picture and rows of a figure."""
    title = f"{paper.name}, {figure.number}: {figure.what}"
    return f"## {figure.number}\n\n![{title}]({picture(paper, figure)})\n\n{rows_table(rows_of(figure))}"


def rows_table(rows: Iterable[StoredRow]) -> str:
    """All rows; those that follow each other and differ in one number of their setting share a line."""
    lines = ["| setting | metric | reported | expected | ours | verdict |", "|---|---|---|---|---|---|"]
    for _, group in groupby(rows, _alike):
        lines += [f"| {' | '.join(line)} |" for line in _folded(list(group))]
    return "\n".join(lines)


def _alike(row: StoredRow) -> tuple[str, str, str]:
    return NUMBER.sub("#", row.setting), row.metric, row.kind


def _folded(rows: list[StoredRow]) -> Iterator[tuple[str, ...]]:
    numbers = [NUMBER.findall(row.setting) for row in rows]
    differing = [place for place, values in enumerate(zip(*numbers, strict=True)) if len(set(values)) > 1]
    if len(differing) > 1:
        for row in rows:
            yield from _folded([row])
        return
    setting = rows[0].setting
    if differing:
        found = list(NUMBER.finditer(setting))[differing[0]]
        listed = ", ".join(each[differing[0]] for each in numbers)
        setting = setting[: found.start()] + listed + setting[found.end() :]
        setting = setting.removesuffix(f" [{listed}]")  # the place in a list of values
    kind = "ok (order)" if rows[0].kind == "ok, order" else rows[0].verdict
    yield (
        setting,
        rows[0].metric,
        _joined(rows, lambda row: _shown(row.reported)),
        _joined(rows, lambda row: _shown(row.expected)),
        ", ".join("" if row.ours is None else f"{row.ours:.4g}" for row in rows),
        kind,
    )


def _joined(rows: list[StoredRow], text: Callable[[StoredRow], str]) -> str:
    texts = [text(row) for row in rows]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def _shown(figure: float | list[float | None] | None) -> str:
    if figure is None:
        return ""
    if not isinstance(figure, list):
        return f"{figure:.4g}"
    low, high = figure
    if low is None:
        return f"<= {high:.4g}"
    return f">= {low:.4g}" if high is None else f"{low:.4g} to {high:.4g}"
