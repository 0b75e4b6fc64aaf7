"""The rooms have one name each, whatever else is on Python's path, and all of them are shipped."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from tools.rooms import HOME, ROOMS

SETUP = tomllib.loads((HOME / "pyproject.toml").read_text())["tool"]


def test_the_package_leads_to_the_rooms_and_to_nothing_else() -> None:
    links = {path.name: path.readlink() for path in (HOME / "farsight").iterdir() if path.is_symlink()}
    assert links == {room: Path("..", room) for room in ROOMS}


def test_every_folder_of_the_rooms_is_shipped_and_typed() -> None:
    shipped = find_packages(str(HOME), include=SETUP["setuptools"]["packages"]["find"]["include"])
    folders = {file.parent.relative_to(HOME) for room in ROOMS for file in (HOME / room).rglob("*.py")}
    assert set(shipped) == {"farsight", *(f"farsight.{folder}".replace("/", ".") for folder in folders)}
    assert (HOME / "farsight" / "py.typed").exists()
    assert SETUP["setuptools"]["package-data"]["farsight"] == ["py.typed"]
    assert "farsight" in SETUP["mypy"]["files"] and SETUP["mypy"]["strict"]


def test_nothing_imports_a_room_by_its_folder() -> None:
    assert set(SETUP["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]) == set(ROOMS)
    assert "TID251" in SETUP["ruff"]["lint"]["select"]


@pytest.mark.parametrize("code", ["import farsight.services.cli", "from farsight import SamplingParams"])
def test_a_project_with_rooms_of_its_own_is_not_touched(code: str, tmp_path: Path) -> None:
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("raise AssertionError(__file__)")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [tmp_path, HOME])), "PYTHONDONTWRITEBYTECODE": "1"}
    found = f"{code}; import sys; print(*({set(ROOMS)!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", found], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
