"""Runs the modules beside this one that have ``rows()``; one core."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil

from rich.console import Console
from rich.table import Table

import benchmarks.decisions
from benchmarks.decisions.row import Row


def main() -> None:
    names = sorted(each.name for each in pkgutil.iter_modules(benchmarks.decisions.__path__))
    names = [name for name in names if name not in ("__main__", "row")]
    parser = argparse.ArgumentParser(description=benchmarks.decisions.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(names)}; all if none is given")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    args = parser.parse_args()
    for name in args.names:
        if name not in names:
            parser.error(f"{name!r} is none of {', '.join(names)}")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows: list[Row] = []
    for name in args.names or names:
        rows += importlib.import_module(f"benchmarks.decisions.{name}").rows()
    if args.json:
        for row in rows:
            print(json.dumps(row.as_dict()))
    else:
        Console().print(_table(rows))


def _table(rows: list[Row]) -> Table:
    table = Table("claim", "measured", "target", "unit", "verdict")
    for row in rows:
        sign = ">=" if row.higher_is_better else "<="
        table.add_row(row.claim, f"{row.measured:.4g}", f"{sign} {row.target:g}", row.unit, row.verdict)
    return table


if __name__ == "__main__":
    main()
