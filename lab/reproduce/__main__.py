"""The command."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Generator
from contextlib import closing

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from farsight.core.children import worker_pool
from farsight.core.processors import usable_processors
from lab.reproduce.papers import gap_lines
from lab.reproduce.register import REPRODUCTIONS
from lab.reproduce.rows import Figure, Reproduction, Row, count_line

JOBS = min(2, usable_processors())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.reproduce", description="Reproduce published results.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="name of a reproduction, as --list shows it")
    parser.add_argument("--all", action="store_true", help="all reproductions")
    parser.add_argument("--list", action="store_true", help="list names and sources, and the figures not covered")
    parser.add_argument("--json", action="store_true", help="JSON lines on standard output")
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N", help=f"processes (default: {JOBS})")
    args = parser.parse_args()
    if args.list:
        for each in REPRODUCTIONS.values():
            print(f"{each.name:24} {each.source}")
        print("\nNot covered:", *gap_lines(), sep="\n  ")
        return
    unknown = [name for name in args.names if name not in REPRODUCTIONS]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(REPRODUCTIONS)}")
    if bool(args.names) == args.all:
        parser.error("pass NAME ... or --all (--list shows the names)")
    chosen = [REPRODUCTIONS[name] for name in (REPRODUCTIONS if args.all else args.names)]
    rows: list[Row] = []
    with closing(_run(chosen, max(1, args.jobs))) as found:
        for row in found:
            rows.append(row)
            if args.json:
                print(json.dumps(row.as_dict()), flush=True)
    if not args.json:
        Console().print(_table(rows))
    print(count_line(rows), file=sys.stderr)


def _run(chosen: list[Reproduction], jobs: int) -> Generator[Row, None, None]:
    """Runs the cells in parallel; returns the rows in order."""
    cells = [cell for each in chosen for cell in each.cells]
    console = Console(stderr=True)
    with (
        worker_pool(jobs) as pool,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("cells", total=len(cells))
        for future in [pool.submit(cell) for cell in cells]:
            yield from future.result()
            progress.advance(task)


def _table(rows: list[Row]) -> Table:
    table = Table("name", "setting", "metric", "reported", "expected", "ours", "verdict", "note")
    for row in rows:
        figures = (_figure(row.reported), _figure(row.expected), _number(row.ours))
        table.add_row(row.name, row.setting, row.metric, *figures, row.verdict, row.remark)
    return table


def _figure(figure: Figure | None) -> str:
    return "" if figure is None else str(figure)


def _number(value: float) -> str:
    return "" if value != value else f"{value:.4g}"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
