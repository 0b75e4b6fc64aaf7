"""The papers' pages: pictures and tables belong to the rows that are kept."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path

import matplotlib as mpl
import pytest

from lab.papers import tables
from lab.papers.pictures import draw
from lab.papers.tables import (
    CONDITIONS,
    DOCS,
    ROWS,
    StoredRow,
    digest,
    picture,
    rows_of,
    rows_table,
    shares_table,
    stored,
)
from lab.pictures.__main__ import PICTURES, STYLE, TARGET
from lab.reproduce.causes import CAUSES, cause_of
from lab.reproduce.papers import PAPERS, Paper, PaperFigure
from lab.reproduce.register import REPRODUCTIONS

SHOWN = [(paper, figure) for paper in PAPERS for figure in paper.figures if figure.reproduction]


@pytest.mark.parametrize(("paper", "figure"), SHOWN, ids=lambda each: getattr(each, "key", getattr(each, "name", "")))
def test_a_figure_has_rows_and_the_picture_of_these_rows(paper: Paper, figure: PaperFigure) -> None:
    assert rows_of(figure), "no row has its setting"
    assert digest(figure) in (DOCS / picture(paper, figure)).read_text("utf-8"), "run: python -m lab.papers"


def test_no_row_and_no_picture_is_without_a_figure() -> None:
    assert {path.stem for path in ROWS.iterdir()} == {figure.reproduction for _, figure in SHOWN}
    pictures = {path.name for path in ROWS.parent.glob("*.svg")}
    assert pictures == {Path(picture(paper, figure)).name for paper, figure in SHOWN}
    for paper in PAPERS:
        for name in paper.reproductions:
            unseen = [row for row in stored(name) if not any(row in rows_of(figure) for figure in paper.figures)]
            assert unseen == []


def row(setting: str, ours: float | None, verdict: str = "ok", basis: str = "printed") -> StoredRow:
    return StoredRow(setting, "JCT s", basis, 2.0, None, ours, verdict, "")


def test_rows_that_differ_in_one_number_share_a_line() -> None:
    table = rows_table([row("rate 1, D1", 1.0), row("rate 2, D1", 2.5), row("rate 2, D1", 3.0, "off")])
    assert table.splitlines()[2:] == [
        "| rate 1, 2, D1 | JCT s | 2 |  | 1, 2.5 | ok |",
        "| rate 2, D1 | JCT s | 2 |  | 3 | off |",
    ]
    two = rows_table([row("rate 1, k=2", 1.0), row("rate 2, k=3", None)])
    assert [line.split(" | ")[0] for line in two.splitlines()[2:]] == ["| rate 1, k=2", "| rate 2, k=3"]


def test_a_picture_is_drawn_along_a_number_or_as_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "papers").mkdir()
    rows = [row(f"rate {rate}", float(rate)) for rate in (1, 2, 4, 32)] + [row("most", None, "off")]
    kept = [{field: getattr(each, field) for field in StoredRow.__dataclass_fields__} for each in rows]
    (tmp_path / "made.jsonl").write_text("\n".join(map(json.dumps, kept)))
    monkeypatch.setattr(tables, "ROWS", tmp_path)
    figure = PaperFigure("Fig 1", "made", "made", settings="rate")
    paper = Paper("Made", "results_made.md", (figure,))
    draw(paper, figure, tmp_path)
    drawn = (tmp_path / "papers" / "made_fig_1.svg").read_text()
    assert digest(figure) in drawn and "JCT s" in drawn and "ours, ok" in drawn
    assert digest(PaperFigure("Fig 1", "made", "made")) not in drawn, "another row belongs to it"


def test_the_share_of_a_paper_counts_what_was_not_fitted() -> None:
    for line, paper in zip(shares_table().splitlines()[2:], PAPERS, strict=True):
        rows = [row for name in paper.reproductions for row in stored(name)]
        printed = [row for row in rows if row.basis == "printed"]
        assert line.startswith(f"| [{paper.name}]({paper.page}) | {len(rows)} |")
        assert f"{sum(row.verdict == 'ok' for row in printed)} of {len(printed)}" in line


def test_no_miss_is_without_its_cause_and_no_cause_without_its_miss() -> None:
    missed = {
        (name, row.setting, row.metric): cause_of(name, row.setting, row.metric)
        for paper in PAPERS
        for name in paper.reproductions
        for row in stored(name)
        if row.verdict == "off" and row.basis in ("printed", "range")
    }
    assert [place for place, cause in missed.items() if cause is None] == []
    assert set(missed.values()) == set(CAUSES)
    assert {cause.shown_by for cause in CAUSES} <= REPRODUCTIONS.keys()
    assert all(not cause.why.endswith(".") and "|" not in cause.why for cause in CAUSES), "they stand in a table"


def test_what_was_changed_to_find_causes_is_kept_with_three_draws() -> None:
    registered = [name for name in REPRODUCTIONS if name.startswith("conditions_")]
    assert [name for paper in PAPERS for name in paper.conditions] == registered
    assert {path.stem for path in CONDITIONS.iterdir()} == set(registered)
    for name in registered:
        rows = stored(name)
        declared = [cell.args[1] for cell in REPRODUCTIONS[name].cells if isinstance(cell, partial)]
        kept = list(dict.fromkeys(row.setting for row in rows))
        assert kept and kept == [setting for setting in declared if setting in kept], "what is kept is still declared"
        assert all(len(row.values) == 3 and "±" in row.interval for row in rows)


def test_every_page_with_a_picture_has_code_that_draws_it() -> None:
    assert {path.stem for path in TARGET.glob("*.svg")} == set(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_up_to_date(name: str) -> None:
    drawn = io.BytesIO()
    with mpl.rc_context(STYLE):
        PICTURES[name]().savefig(drawn, format="svg", metadata={"Date": None})
    assert drawn.getvalue() == (TARGET / f"{name}.svg").read_bytes(), f"run: python -m lab.pictures {name}"
