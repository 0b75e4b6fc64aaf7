"""One part of the comparison: as many of the missing runs as fit into the time that a quiet machine is there for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.real_presets.cells import Bench, Run, System, known_capacity, measure_capacity, run_one, running

STARTS_S = 40.0
"""Until a server is ready: a Farsight takes 15 seconds, a vLLM up to a minute."""

DRAIN_S = 15.0
"""Warm-up, and what is left to answer after the last arrival, beside what an overload leaves."""

STOPS_S = 10.0


def expected_s(num_requests: int, load: float, per_s: float) -> float:
    """How long a run takes: its server's start and end, and its arrivals, or the work that they bring if that is more.

    Args:
        per_s: Requests per second at a load of 1.
    """
    return STARTS_S + num_requests / per_s / min(load, 1.0) + DRAIN_S + STOPS_S


def measure_part(bench: Bench, systems: Sequence[System], runs: Sequence[Run], folder: Path, for_s: float) -> int:
    """Measures the first missing runs, and the capacity where it is not known; returns how many runs are left.

    At least one of them, since a part that does nothing never ends the whole. Each server runs alone: one that idles
    takes a tenth of a core.

    Args:
        runs: All that are missing, in order.
        for_s: Seconds until the last server has ended again; ``math.inf`` for all runs at once.
    """
    ends_at = time.monotonic() + for_s
    by_name = {each.name: each for each in systems}
    has_measured = False
    for number, run in enumerate(runs):
        per_s = known_capacity(run.workload, folder)
        if per_s is None:
            with running(bench, systems[0], folder) as target:
                per_s = measure_capacity(bench, target, run.workload, folder, ends_at - STOPS_S - time.monotonic())
            has_measured = True
        if has_measured and time.monotonic() + expected_s(bench.num_requests, run.load, per_s) > ends_at:
            return len(runs) - number
        with running(bench, by_name[run.system], folder) as target:
            run_one(bench, target, per_s, run, folder)
        has_measured = True
    return 0
