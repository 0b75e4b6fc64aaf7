"""One part of the comparison: as many of the missing runs as fit into the time that a quiet machine is there for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.real_presets.cells import Bench, Run, System, known_capacity, measure_capacity, run_one, running

DRAIN_S = 15.0
"""Warm-up, and what is left to answer after the last arrival, beside what an overload leaves."""

STARTS_S = 60.0
"""Servers start; a part that names fewer runs than it could starts only the servers that those need."""

STOPS_S = 10.0


def expected_s(num_requests: int, load: float, per_s: float) -> float:
    """How long a run takes: its arrivals, or the work that they bring if that is more."""
    return num_requests / per_s / min(load, 1.0) + DRAIN_S


def first_that_fit(runs: Sequence[Run], num_requests: int, per_s: dict[str, float], left_s: float) -> list[Run]:
    """The leading runs that end within ``left_s``; at least one, since a part that does nothing never ends the whole.

    Args:
        per_s: Requests per second at a load of 1, by workload, as far as known: only such runs are counted on.
    """
    chosen: list[Run] = []
    for run in runs:
        if run.workload not in per_s:
            break
        left_s -= expected_s(num_requests, run.load, per_s[run.workload])
        if chosen and left_s < 0:
            break
        chosen.append(run)
    return chosen


def measure_part(bench: Bench, systems: Sequence[System], runs: Sequence[Run], folder: Path, for_s: float) -> int:
    """Measures the first missing runs, and the capacity where it is not known; returns how many runs are left.

    Args:
        runs: All that are missing, in order.
        for_s: Seconds until all servers have ended again; ``math.inf`` for all runs at once.
    """
    if not runs:
        return 0
    ends_at = time.monotonic() + for_s - STOPS_S
    per_s = {run.workload: known for run in runs if (known := known_capacity(run.workload, folder)) is not None}
    chosen = first_that_fit(runs, bench.num_requests, per_s, for_s - STARTS_S - STOPS_S)
    if not chosen:
        _measure_capacity(bench, systems[0], runs[0].workload, folder, ends_at)
        return len(runs)
    needed = [each for each in systems if each.name in {run.system for run in chosen}]
    num_done = 0
    with running(bench, needed, folder) as targets:
        for run in chosen:
            takes_s = expected_s(bench.num_requests, run.load, per_s[run.workload])
            if num_done and time.monotonic() + takes_s > ends_at:
                break
            run_one(bench, targets[run.system], per_s[run.workload], run, folder)
            num_done += 1
    return len(runs) - num_done


def _measure_capacity(bench: Bench, system: System, workload: str, folder: Path, ends_at: float) -> None:
    with running(bench, [system], folder) as targets:
        measure_capacity(bench, targets[system.name], workload, folder, ends_at - time.monotonic())
