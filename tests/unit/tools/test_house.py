"""The measures of the house count what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farsight_rooms import ROOMS
from tools import house

CHAIN = {"a": {"b"}, "b": {"c"}, "c": set[str](), "d": {"c"}}


def test_floors_are_the_longest_chain_of_imports() -> None:
    assert house.floors(CHAIN) == 3
    assert house.floors({}) == 0


def test_modules_that_import_each_other_are_a_circle() -> None:
    assert house.circles(CHAIN) == []
    assert house.circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_a_name_of_two_classes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("class Both: ...\nclass _Own: ...\n" + f"class Only{name}: ...\n")
    monkeypatch.setattr(house, "python_files", lambda *_: sorted(tmp_path.glob("*.py")))
    assert house.class_names_twice() == ["Both"]
    assert house.num_lines() == 6


def test_no_room_goes_in_circles() -> None:
    for room in ROOMS:
        assert house.circles(house.imports_of(room)) == [], room


def test_every_measure_has_an_aim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(house, "files_to_first_token", lambda preset: 40 + len(preset))
    monkeypatch.setattr(sys, "argv", ["house"])
    house.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(house.AIMS)
    assert "44  at most      45" in lines[list(house.AIMS).index("files_to_first_token")]
