"""The sizes that the house has to keep, by one command: ``python -m tools.house [--json]``.

Lines and files are those that git holds; imports are those of code that runs, not those that only types need.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import functools
import json
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import grimp

from farsight.core.config.scheduling import BatchConfig, PlacementConfig, SchedulerConfig
from farsight.policies.settings import BatchSettings, MlfqRules, PolicySettings
from tools.rooms import ROOMS

ROOT = Path(__file__).parents[1]
LABORATORY = ("lab", "benchmarks")
HTTP = "farsight.services.api"
AIMS: dict[str, int] = {
    "house_lines": 88_000,
    "laboratory_lines": 16_000,
    "test_lines": 60_000,
    "files": 640,
    "http_floors": 8,
    "files_to_first_token": 45,
    "settings_declared_twice": 0,
    "modules_in_circles": 0,
    "class_names_twice": 0,
    "decisions": 30,
}

Graph = Mapping[str, Iterable[str]]


def python_files(*folders: str) -> list[Path]:
    """Returns the Python files of folders, or files, that git holds."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if name.endswith(".py") and (ROOT / name).is_file()]


def num_lines(*folders: str) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in python_files(*folders))


@functools.cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph("farsight", exclude_type_checking_imports=True, cache_dir=None)


def imports_of(room: str) -> dict[str, set[str]]:
    """Returns the modules of a room, each with those of the room that it imports."""
    own = {module for module in _graph().modules if f"{module}.".startswith(f"farsight.{room}.")}
    return {module: _graph().find_modules_directly_imported_by(module) & own for module in own}


def circles(imports: Graph) -> list[list[str]]:
    """Returns the sets of modules that import each other (Tarjan, 1972), each in order of its names."""
    found: list[list[str]] = []
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in imports.get(module, ()):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            place = stack.index(module)
            members = stack[place:]
            del stack[place:]
            if len(members) > 1:
                found.append(sorted(members))

    for module in imports:
        if module not in index:
            visit(module)
    return found


def floors(imports: Graph) -> int:
    """Returns the number of modules on the longest chain of imports, of a graph without circles."""
    heights: dict[str, int] = {}

    def height(module: str) -> int:
        if module not in heights:
            heights[module] = 1 + max((height(other) for other in imports[module] if other in imports), default=0)
        return heights[module]

    return max(map(height, imports), default=0)


def class_names_twice(*folders: str) -> list[str]:
    """Returns the names that stand for several public classes."""
    places: dict[str, int] = defaultdict(int)
    for path in python_files(*folders):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name] += 1
    return sorted(name for name, number in places.items() if number > 1)


def settings_declared_twice() -> list[str]:
    """Returns the settings that a table of ``farsight.toml`` and a class of the policies both declare."""
    tables = {field.name for kind in (SchedulerConfig, PlacementConfig, BatchConfig) for field in fields(kind)}
    parts = {field.name for kind in (PolicySettings, MlfqRules, BatchSettings) for field in fields(kind)}
    return sorted(tables & parts - {"placement", "mlfq"})


def files_to_first_token(preset: str) -> int:
    from tools.request_path import trace_request

    with tempfile.TemporaryDirectory() as folder:
        return len(asyncio.run(trace_request(preset, Path(folder))))


def measures() -> dict[str, Any]:
    """Returns each measure by its name; lists count by their lengths."""
    rooms = {room: imports_of(room) for room in ROOMS}
    http = {module: others for module, others in rooms["services"].items() if f"{module}.".startswith(f"{HTTP}.")}
    return {
        "house_lines": num_lines("farsight", *ROOMS),
        "laboratory_lines": num_lines(*LABORATORY),
        "test_lines": num_lines("tests"),
        "files": len(python_files("farsight", *ROOMS, "lab")),
        "http_floors": floors({module: others & http.keys() for module, others in http.items()}),
        "files_to_first_token": files_to_first_token("fcfs"),
        "settings_declared_twice": settings_declared_twice(),
        "modules_in_circles": [" <-> ".join(each) for imports in rooms.values() for each in circles(imports)],
        "class_names_twice": class_names_twice(*ROOMS),
        "decisions": len(list((ROOT / "docs" / "adr").glob("[0-9]*.md"))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    found = measures()
    if parser.parse_args().json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        listed = ": " + ", ".join(value) if isinstance(value, list) and value else ""
        number = len(value) if isinstance(value, list) else value
        print(f"{name:24} {number:>8,}  at most {AIMS[name]:>7,}{listed}")


if __name__ == "__main__":
    main()
