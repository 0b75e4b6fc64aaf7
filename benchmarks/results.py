"""What all benchmarks share: statistics of runs, markdown tables, and a JSON file that says how it was made."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Metrics = dict[str, float]
"""Numbers of one run, by name; a number that the run does not give is absent."""

PACKAGES = ("farsight", "torch", "ray", "tokenizers", "aiohttp", "uvloop")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def distribution(name: str, values: Sequence[float]) -> Metrics:
    """Mean, p50 and p99 under ``name_mean`` and so on; nothing if there are no values."""
    if not values:
        return {}
    points = {"mean": statistics.fmean(values), "p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}
    return {f"{name}_{point}": value for point, value in points.items()}


def level(concurrency: int, runs: Sequence[Metrics]) -> dict[str, Any]:
    """The repeats at one concurrency and, of each number, their min, median and max."""
    names = dict.fromkeys(name for run in runs for name in run)
    summary = {name: _spread([run[name] for run in runs if name in run]) for name in names}
    return {"concurrency": concurrency, "summary": summary, "runs": list(runs)}


def _spread(values: Sequence[float]) -> Metrics:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def level_table(levels: Iterable[dict[str, Any]], columns: Mapping[str, Sequence[str]]) -> str:
    """A row for each concurrency. ``columns`` maps a heading to the numbers it shows.

    One number is shown as median (min to max), several as their medians, divided by slashes.
    """
    rows = [
        [str(entry["concurrency"]), *(_cell(entry["summary"], names) for names in columns.values())] for entry in levels
    ]
    return markdown_table(["concurrency", *columns], rows)


def _cell(summary: dict[str, Metrics], names: Sequence[str]) -> str:
    shown = [summary.get(name) for name in names]
    if len(shown) == 1 and shown[0] is not None and shown[0]["min"] != shown[0]["max"]:
        spread = shown[0]
        return f"{_short(spread['median'])} ({_short(spread['min'])} to {_short(spread['max'])})"
    return " / ".join("-" if spread is None else _short(spread["median"]) for spread in shown)


def _short(value: float) -> str:
    """Three digits that matter, and all those before the point."""
    if value == 0 or abs(value) >= 100 or float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its columns aligned."""
    lines = [list(header), ["-" * len(cell) for cell in header], *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines[1] = ["-" * width for width in widths]
    cells = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def provenance(module: str) -> dict[str, Any]:
    """How the numbers came about: the command, the code, the versions and the machine."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "machine": {
            "platform": platform.platform(),
            "cpu": _cpu_model(),
            "cpu_count": os.cpu_count(),
            "load_average": os.getloadavg(),
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit of this checkout, with ``-dirty`` if files differ from it; empty outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def write_json(path: Path | None, record: dict[str, Any]) -> None:
    """Writes ``record``, if a path is given."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
