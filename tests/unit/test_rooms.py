"""A foreign package with the name of a room is named before it does harm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import farsight_rooms
from farsight_rooms import HOME, ROOMS

COMMAND = "from farsight_rooms import main; main()"


def run(code: str, cwd: Path, *path: Path, installed: bool = True) -> subprocess.CompletedProcess[str]:
    """Python elsewhere, with ``path`` before what is installed, if that counts at all."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *([] if installed else ["-S"]), "-c", f"import sys; sys.path[:1] = []; {code}"]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(
    "code", ["import services.cli", "from engine import Engine", "import actors.runtime.peer", COMMAND]
)
def test_a_foreign_package_is_named_with_what_to_do(code: str, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign" / "core"
    foreign.mkdir(parents=True)
    (foreign / "__init__.py").touch()
    done = run(code, tmp_path, foreign.parent, HOME)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert f"'core' is found at {foreign}" in said
    assert str(HOME) in said
    assert "Use an environment that holds Farsight alone" in said
    assert ("Traceback" in done.stderr) == (code != COMMAND)


def test_a_module_is_named_as_well_and_a_missing_room_but_no_folder_without_init(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    assert run("from farsight_rooms import check_rooms; check_rooms()", tmp_path, tmp_path, HOME).returncode == 0
    (tmp_path / "kvcache.py").touch()
    done = run(COMMAND, tmp_path, tmp_path, HOME)
    assert (done.returncode, f"'kvcache' is found at {tmp_path / 'kvcache.py'}" in done.stderr) == (1, True)
    (tmp_path / "alone").mkdir()
    shutil.copy(farsight_rooms.__file__, tmp_path / "alone")
    done = run(COMMAND, tmp_path / "alone", tmp_path / "alone", installed=False)
    assert "the package 'core' is missing" in done.stderr


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_half_of_another_checkout_is_called_so(first: str, tmp_path: Path) -> None:
    """From either side: its check finds our rooms, or ours finds its."""
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "__init__.py").touch()
    shutil.copy(farsight_rooms.__file__, tmp_path)
    load = (
        f"import sys; sys.path.insert(0, {str(HOME)!r}); import farsight_rooms; del sys.path[0]; "
        if first == "ours"
        else ""
    )
    done = run(load + COMMAND, tmp_path, tmp_path, HOME)
    room = "tokenization" if first == "theirs" else "core"
    assert f"the package {room!r} is found at" in done.stderr
    assert "another checkout of Farsight" in done.stderr


def test_the_rooms_are_those_that_are_installed_and_all_are_typed() -> None:
    setup = tomllib.loads((HOME / "pyproject.toml").read_text())["tool"]
    packages = setup["setuptools"]["packages"]
    assert [each for each in packages if "." not in each] == list(ROOMS)
    assert setup["setuptools"]["package-data"]["*"] == ["py.typed"]
    assert all((HOME / each / "py.typed").exists() for each in ROOMS)
    on_disk = {
        str(each.parent.relative_to(HOME)).replace("/", ".") for room in ROOMS for each in (HOME / room).rglob("*.py")
    }
    assert set(packages) == on_disk
    assert set(ROOMS) <= set(setup["mypy"]["files"]) and setup["mypy"]["strict"]
