"""Tables, and a JSON file that also records how its numbers were made."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farsight.core.processors import usable_processors
from farsight.services.bench.statistics import Metrics

PACKAGES = ("farsight", "torch", "triton", "xformers", "ray", "tokenizers", "aiohttp", "uvloop")

_LATENCIES = ("ttft", "tpot", "itl", "mtpot", "jct")
_POINTS = ("mean", "p50", "p99")

ROWS: Mapping[str, str] = {
    "output tok/s": "output_tokens_per_s",
    "req/s": "requests_per_s",
    **{f"{name.upper()} ms {point}": f"{name}_ms_{point}" for name in _LATENCIES for point in _POINTS},
    "goodput req/s": "goodput_requests_per_s",
    "within SLA %": "sla_percent",
    "ended by themselves": "answers_ended",
    "cut at the limit": "answers_cut",
    "errors": "errors",
    "tokens per chunk": "tokens_per_chunk",
    "server CPU s": "server_cpu_s",
    "tok per server CPU-s": "output_tokens_per_server_cpu_s",
    "client CPU s": "client_cpu_s",
    "cores others use": "other_cores",
    "sent late ms p99": "late_ms_p99",
}
"""A heading and the number that it shows."""


def case_table(case: Mapping[str, Any]) -> str:
    """The table of one load: a row per number, a column per server and per ratio to the first; median (min to max)."""
    targets, compared = case["targets"], case["ratios"]
    header = [case["name"], *(target["label"] for target in targets)]
    header += [f"{ratio['label']} / {ratio['base']}" for ratio in compared]
    rows = []
    for heading, name in {**ROWS, **_rows_by_kind(targets)}.items():
        if any(name in target["summary"] for target in targets):
            summaries = [*(target["summary"] for target in targets), *(ratio["ratios"] for ratio in compared)]
            rows.append([heading, *(cell(summary, [name]) for summary in summaries)])
    return markdown_table(header, rows)


def _rows_by_kind(targets: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Rows with the median JCT of each kind of request, if there are several, such as short and long ones."""
    end = "_jct_ms_p50"
    names = dict.fromkeys(name for target in targets for name in target["summary"] if name.endswith(end))
    return {f"JCT ms p50, {name.removesuffix(end)}": name for name in names}


def cell(summary: Mapping[str, Metrics], names: Sequence[str]) -> str:
    """One number as median (min to max), several as medians."""
    shown = [summary.get(name) for name in names]
    if len(shown) == 1 and shown[0] is not None and shown[0]["min"] != shown[0]["max"]:
        spread = shown[0]
        return f"{_short(spread['median'])} ({_short(spread['min'])} to {_short(spread['max'])})"
    return " / ".join("-" if spread is None else _short(spread["median"]) for spread in shown)


def _short(value: float) -> str:
    """Three significant digits, and all digits before the point."""
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


def provenance(program: Sequence[str]) -> dict[str, Any]:
    """The provenance of the numbers: the command, the code, the versions and the machine.

    Args:
        program: The program's name, without arguments.
    """
    return {
        "command": shlex.join([*program, *_without_keys(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "machine": {
            "platform": platform.platform(),
            "cpu": _cpu_model(),
            "cpu_count": usable_processors(),
            "load_average": os.getloadavg(),
        },
    }


def _without_keys(arguments: Sequence[str]) -> list[str]:
    """The command line without the API key, since result files are passed on."""
    kept = list(arguments)
    for i, argument in enumerate(arguments):
        if argument == "--api-key" and i + 1 < len(kept):
            kept[i + 1] = "..."
        elif argument.startswith("--api-key="):
            kept[i] = "--api-key=..."
    return kept


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit of this checkout, with ``-dirty`` if files differ from it; empty outside one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""  # The package may be installed inside another project's checkout.
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def write_json(path: Path | None, record: Mapping[str, Any]) -> None:
    """Writes ``record``, if a path is given: whole, or not at all."""
    if path is not None:
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        beside.replace(path)
