"""The command that runs published results again."""

from __future__ import annotations

import json
import math
import sys

import pytest

from farsight.core.errors import InvalidValueError
from lab.reproduce import __main__ as command
from lab.reproduce.papers import PAPERS, gap_lines
from lab.reproduce.register import REPRODUCTIONS
from lab.reproduce.rows import (
    EXACT,
    Check,
    Draws,
    Exempt,
    Figure,
    Fitted,
    OrderCheck,
    Own,
    Printed,
    Reproduction,
    Row,
    at_least,
    at_most,
    between,
    judge,
    near,
    per_cent,
)

KEYS = {"name", "setting", "metric", "basis", "reported", "expected", "ours", "ratio", "verdict", "note"}
KEYS |= {"draws", "values"}


def first() -> list[Row]:
    return [
        Row("small", "a", "s", Printed(near(2)), 1.0, "why"),
        Row("small", "b", "s", OrderCheck(True), 3.0, "", EXACT),
    ]


def second() -> list[Row]:
    return [Row("small", "c", "s", Exempt("drawn"), math.nan), Row("small", "d", "s", Own(at_most(4)), 3.0)]


SMALL = Reproduction("small", "A paper, Table 1", (first, second))


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce", *words])
    command.main()


def test_list_shows_names_and_sources(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "--list")
    names, gaps = capsys.readouterr().out.split("\n\nNot covered:\n")
    lines = names.splitlines()
    assert [line.split()[0] for line in lines] == list(REPRODUCTIONS)
    assert all(each.source in line for each, line in zip(REPRODUCTIONS.values(), lines, strict=True))
    assert [line.strip() for line in gaps.splitlines()] == gap_lines()


def test_every_reproduction_of_a_paper_shows_a_figure_of_it() -> None:
    """What the papers name is in the register, and what is in the register for a paper is named."""
    figures = [figure for paper in PAPERS for figure in paper.figures if figure.reproduction]
    prefixes = ("magnus_", "multibin_", "fastserve_", "past_future_", "preble_")
    registered = {name for name in REPRODUCTIONS if name.startswith(prefixes)}
    assert {figure.reproduction for figure in figures if not figure.command} == registered
    assert all(figure.why for paper in PAPERS for figure in paper.figures if not figure.reproduction)
    assert all(each.cells and each.name == name for name, each in REPRODUCTIONS.items())


@pytest.mark.parametrize("words", [("nonsense",), (), ("--all", "multibin_theory")])
def test_bad_words_end_with_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *words)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert ("'nonsense' is none of magnus_case_study" in message) == (words == ("nonsense",))
    assert ("pass NAME" in message) == (words != ("nonsense",))


def test_json_lines_come_in_order_with_all_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "REPRODUCTIONS", {"small": SMALL, "other": SMALL})
    run(monkeypatch, "small", "--json", "--jobs", "2")
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [row["setting"] for row in rows] == ["a", "b", "c", "d"]
    assert all(set(row) == KEYS for row in rows)
    assert (rows[0]["ratio"], rows[0]["verdict"], rows[0]["note"]) == (0.5, "off", "why")
    assert [rows[1]["reported"], rows[1]["ratio"], rows[2]["ours"], rows[2]["ratio"]] == [None] * 4
    assert [row["basis"] for row in rows] == ["printed", "order", "exempt", "own"]
    assert (rows[3]["reported"], rows[3]["expected"]) == (None, [None, 4])
    assert printed.err.strip() == (
        "4 rows: 0 ok against printed numbers, 0 ok (printed ranges), 1 ok (orders), 1 ok (own formulas and targets), "
        "0 fitted, 1 off, 0 open, 1 exempt"
    )
    run(monkeypatch, "--all", "--jobs", "1")
    table = capsys.readouterr().out
    assert all(word in table for word in ("setting", "reported", "expected", "verdict", "exempt"))


def test_the_verdict_follows_from_the_check_and_the_number() -> None:
    assert judge(Printed(per_cent(13.7)), 0.5) == "off"
    assert judge(Printed(per_cent(13.7)), 10.3) == "ok"
    assert judge(Printed(per_cent(5.1)), 3.2) == "ok", "2 points are more than a quarter of it"
    assert judge(Printed(near(242, points=0.5)), 242.1) == "ok"
    assert judge(Fitted(near(242, points=0.5)), 242.1) == "fitted"
    assert judge(Fitted(near(242, points=0.5)), 111.4) == "off", "missed although it was fitted to"
    assert judge(Own(near(6.4475, points=5e-5)), 6.4475) == "ok"
    orders = [OrderCheck(holds, fitted=fitted) for holds in (True, False) for fitted in (False, True)]
    assert [judge(order, 2.0, EXACT) for order in orders] == ["ok", "fitted", "off", "off"]
    assert judge(Exempt("drawn, not printed"), 2.0) == "exempt"


@pytest.mark.parametrize(
    ("draws", "ours", "verdict"),
    [
        (Draws(1), 1.5, "open"),  # one workload
        (Draws(2), 1.5, "open"),
        (Draws(3), 1.5, "ok"),
        (Draws(3), 1.029, "open"),  # the mean alone: within 3 %
        (Draws(3), 1.0, "open"),
        (Draws(3, (1.01, 1.02, 1.03)), 1.02, "ok"),  # little, but the same each time
        (Draws(3, (1.3, 1.5, 0.99)), 1.263, "open"),  # one draw the other way
        (Draws(3, (1.01, 1.02, 2.0)), 1.343, "open"),  # within two standard errors
        (EXACT, 1.001, "ok"),
    ],
)
def test_an_order_within_chance_is_open(draws: Draws, ours: float, verdict: str) -> None:
    assert judge(OrderCheck(ours >= 1, bound=1.0), ours, draws) == verdict
    assert judge(OrderCheck(ours >= 1, fitted=True, bound=1.0), ours, draws) == verdict.replace("ok", "fitted")
    assert judge(OrderCheck(False, bound=1.0), ours, draws) == "off", "doubt makes no failure better"


def test_a_printed_range_is_no_printed_number_and_one_draw_in_it_is_open() -> None:
    check = Printed(between(1.5, 14.5))
    assert check.basis == "range"
    assert Printed(near(2)).basis == "printed"
    assert judge(check, 7.3) == "open"
    assert judge(check, 7.3, Draws(3, (7.0, 7.3, 7.6))) == "ok"
    assert judge(check, 1.52, Draws(3, (1.51, 1.52, 1.53))) == "ok"
    assert judge(check, 1.6, Draws(3, (1.52, 1.53, 1.75))) == "open", "within two standard errors of its end"
    assert judge(check, 18.5) == "off"


def test_a_tolerance_as_large_as_the_figure_decides_nothing() -> None:
    assert [judge(Printed(near(each, points=2.0)), each) for each in (1.58, 2.0, 0.0, 2.1)] == ["open"] * 3 + ["ok"]
    assert judge(Fitted(near(1.0, points=2.0)), 1.0) == "open"
    assert judge(Printed(near(0.0)), 0.0) == "ok", "no tolerance"
    assert judge(Printed(near(1.58, points=2.0)), 4.0) == "off"


def test_what_was_not_measured_agrees_with_nothing() -> None:
    for check in (Printed(near(1, points=9)), Fitted(at_least(0)), Own(at_most(9))):
        assert judge(check, math.nan) == "off"


def test_a_figure_is_a_number_or_a_range_of_them() -> None:
    hundred, below = near(100, share=0.02), near(-100, share=0.02)
    assert [hundred.holds(each) for each in (102, 97.9)] == [True, False]
    assert below.holds(-99)
    assert [between(2, 3).holds(each) for each in (1.99, 2, 3, 3.01)] == [False, True, True, False]
    shown = [str(each) for each in (hundred, between(2, 3), at_least(2), at_most(3))]
    assert shown == ["100", "2 to 3", ">= 2", "<= 3"]
    for ends in ((math.nan, math.nan), (3.0, 2.0), (-math.inf, math.inf)):
        with pytest.raises(InvalidValueError, match="figure"):
            Figure(*ends)


def test_a_row_is_held_against_something() -> None:
    """Neither a bare verdict nor an exemption without a reason can become a row."""
    with pytest.raises(InvalidValueError, match="why nothing is compared"):
        Exempt(" ")
    for nothing in (None, "ok", math.nan, 2.0):
        with pytest.raises(InvalidValueError, match="a printed figure, an order"):
            Row("small", "a", "s", nothing, 1.0)  # type: ignore[arg-type]


CHEAP = ("magnus_case_study", "multibin_theory", "fastserve_fig6")


@pytest.mark.parametrize("name", CHEAP)
def test_the_rows_of_the_cheap_ones_say_what_they_are_held_against(name: str) -> None:
    rows = list(REPRODUCTIONS[name].rows())
    assert rows and all(isinstance(row.check, Check) for row in rows)
    for row in rows:
        assert (row.reported is not None) == isinstance(row.check, Printed | Fitted)
        assert row.note or isinstance(row.check, Exempt), f"{row.setting}, {row.metric}: no tolerance is said"
