"""The command that runs published results again."""

from __future__ import annotations

import json
import math
import sys

import pytest

from simulator.reproduce import __main__ as command
from simulator.reproduce.register import REPRODUCTIONS
from simulator.reproduce.rows import Reproduction, Row, close, holds, within

KEYS = {"name", "setting", "metric", "reported", "ours", "ratio", "verdict", "note"}


def first() -> list[Row]:
    return [Row("small", "a", "s", 2.0, 1.0, "off", "why"), Row("small", "b", "s", math.nan, 3.0, "ok")]


def second() -> list[Row]:
    return [Row("small", "c", "s", 0.0, math.nan, "exempt")]


SMALL = Reproduction("small", "A paper, Table 1", (first, second))


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce", *words])
    command.main()


def test_list_shows_names_and_sources(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "--list")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(REPRODUCTIONS)
    assert all(each.source in line for each, line in zip(REPRODUCTIONS.values(), lines, strict=True))


def test_names_are_those_of_the_register() -> None:
    assert all(each.cells and each.name == name for name, each in REPRODUCTIONS.items())
    assert {"magnus_case_study", "multibin_theory", "multibin_errors"} <= set(REPRODUCTIONS)


@pytest.mark.parametrize("words", [("nonsense",), (), ("--all", "multibin_theory")])
def test_bad_words_end_with_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *words)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert ("'nonsense' is none of magnus_case_study" in message) == (words == ("nonsense",))
    assert ("say which" in message) == (words != ("nonsense",))


def test_json_lines_come_in_order_with_all_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "REPRODUCTIONS", {"small": SMALL, "other": SMALL})
    run(monkeypatch, "small", "--json", "--jobs", "2")
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [row["setting"] for row in rows] == ["a", "b", "c"]
    assert all(set(row) == KEYS for row in rows)
    assert (rows[0]["ratio"], rows[0]["verdict"], rows[0]["note"]) == (0.5, "off", "why")
    assert [rows[1]["reported"], rows[1]["ratio"], rows[2]["ours"], rows[2]["ratio"]] == [None] * 4
    assert "3 rows, 1 off" in printed.err


def test_a_table_without_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "REPRODUCTIONS", {"small": SMALL})
    run(monkeypatch, "--all", "--jobs", "1")
    table = capsys.readouterr().out
    assert all(word in table for word in ("setting", "reported", "verdict", "exempt"))


def test_verdicts() -> None:
    assert (within(102, 100, 0.02), within(97.9, 100, 0.02), within(-99, -100, 0.02)) == ("ok", "off", "ok")
    assert (close(5, 6, 1), close(5, 6.1, 1)) == ("ok", "off")
    assert (holds(True), holds(False)) == ("ok", "off")
