"""The command of a study: measures what is missing, prints a row for each claim."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.live_presets.claims import Claim
from benchmarks.live_presets.priority import can_come_first
from benchmarks.live_presets.runs import Figures, Run, Store, measure
from benchmarks.live_presets.study import Study
from farsight.core.children import worker_pool

SHOWN = ("claim", "ratio", "low", "high", "target", "verdict", "live", "simulated", "requests", "gap_ms", "lag_ms")


def parse(study: Study, words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=study.description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", action="append", help="claims whose names contain this; repeatable")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=11)
    parser.add_argument("--requests", type=int, help="of every run; default: each setup's own")
    parser.add_argument("--speed", type=float, default=1.0, help="divides the times of profile and arrivals")
    parser.add_argument("--jobs", type=int, default=8, help="runs side by side; each takes about a seventh of a core")
    parser.add_argument(
        "--real-time", action="store_true", help="live runs come before all other work on the machine (Linux, as root)"
    )
    parser.add_argument("--cache", type=Path, default=study.cache)
    parser.add_argument("--data", type=Path, help="folder of the data sets [FARSIGHT_DATA]")
    parser.add_argument("--json", action="store_true", help="a line for each claim")
    return parser.parse_args(words)


def main(study: Study, words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measures what is missing, prints and returns the rows."""
    args = parse(study, words)
    if args.data is not None:
        os.environ["FARSIGHT_DATA"] = str(args.data)
    claims = [claim for claim in study.claims if not args.only or any(name in claim.name for name in args.only)]
    if args.real_time and not can_come_first():
        raise SystemExit("--real-time: only root may ask for that, on Linux")
    if not claims:
        raise SystemExit(f"--only: no claim is called so; there are: {'; '.join(claim.name for claim in study.claims)}")
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    args.cache.parent.mkdir(parents=True, exist_ok=True)
    _measure(study, args.cache, list(_groups(study, claims, seeds, args)), args.jobs, args.real_time)
    store = Store(args.cache)

    def row(claim: Claim) -> dict[str, Any]:
        def figures(system: str, seed: int, live: bool) -> Figures:
            found = store.get(_run(study, claim.setup, system, seed, live, args))
            assert found is not None, "every run has been measured"
            return found

        return claim.row(seeds, _num_requests(study, claim.setup, args), figures)

    rows = [row(claim) for claim in claims]
    _print(rows, as_json=args.json)
    return rows


def _groups(study: Study, claims: Sequence[Claim], seeds: range, args: argparse.Namespace) -> Iterator[list[Run]]:
    """The runs of a setup and seed, which share their arrivals."""
    for setup in dict.fromkeys(claim.setup for claim in claims):
        systems = dict.fromkeys(name for claim in claims if claim.setup == setup for name in claim.systems)
        for seed in seeds:
            yield [_run(study, setup, name, seed, live, args) for live in (True, False) for name in systems]


def _run(study: Study, setup: str, system: str, seed: int, live: bool, args: argparse.Namespace) -> Run:
    speed = args.speed if live else 1.0
    return Run(setup, system, seed, _num_requests(study, setup, args), speed, live)


def _num_requests(study: Study, setup: str, args: argparse.Namespace) -> int:
    return args.requests or study.setups[setup].num_requests


def _measure(study: Study, cache: Path, groups: Sequence[list[Run]], jobs: int, real_time: bool) -> None:
    if jobs == 1:
        for group in groups:
            measure(study, cache, group, real_time=real_time)
        return
    with worker_pool(jobs) as pool:
        one = partial(measure, study, cache, real_time=real_time)
        for done in as_completed([pool.submit(one, group) for group in groups]):
            done.result()


def _print(rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*SHOWN)
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in SHOWN))
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
