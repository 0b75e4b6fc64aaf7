"""Writes docs/coverage.md from coverage.py's JSON report: ``make coverage``.

python -m tools.coverage_table REPORT.json docs/coverage.md
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tools.rooms import ROOMS

PAGE = """# Coverage

Branches that the pure tests take, measured on {date} with `make coverage`, which writes this page. A branch is one way
out of a condition or a loop. The pure tests are those of `tests/unit`, `tests/sim` and `tests/protocol` that
`make test` runs; they start neither Ray nor a server. Processes that a test starts are measured as well.

{table}

Not measured are tests that start Ray or a server (`tests/actors`, `tests/e2e`, `tests/nodes`), tests on a GPU
(`tests/gpu`) and tests marked `nightly`. They take most of the remaining branches of `actors/`, `engine/` and
`services/`.
No number here is a gate: a branch that no test takes is a question to its author.
"""


def table(report: dict[str, Any]) -> str:
    """One row a room, in the order of the layers, and one for all."""
    rooms: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path, file in report["files"].items():
        counts = {key: value for key, value in file["summary"].items() if isinstance(value, int)}
        for row in (Path(path).parts[0], ""):
            rooms[row].update(counts)
    rows = [_row(f"`{room}/`", rooms[room]) for room in ROOMS if room in rooms]
    header = ["| room | branches | taken | share | statements | run | share |", "|---|--:|--:|--:|--:|--:|--:|"]
    return "\n".join([*header, *rows, _row("all", rooms[""])])


def _row(name: str, counts: Counter[str]) -> str:
    branches, taken = counts["num_branches"], counts["covered_branches"]
    statements, run = counts["num_statements"], counts["covered_lines"]
    cells = [name, f"{branches:,}", f"{taken:,}", _share(taken, branches)]
    return f"| {' | '.join([*cells, f'{statements:,}', f'{run:,}', _share(run, statements)])} |"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def main(report: Path, page: Path) -> None:
    """Raises KeyError where ``report`` was not made by ``coverage json`` with branches."""
    found = json.loads(report.read_text())
    page.write_text(PAGE.format(date=found["meta"]["timestamp"][:10], table=table(found)))


if __name__ == "__main__":
    source, target = sys.argv[1:]
    main(Path(source), Path(target))
