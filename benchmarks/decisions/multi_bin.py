"""Multi-Bin: one arrival, bins and sealed batches behind it."""

from __future__ import annotations

import math
from itertools import count

from benchmarks.decisions.row import Row, median_s
from farsight.policies.batching.multi_bin import MultiBinBatcher, uniform_edges
from farsight.policies.interfaces import Job

PER_CALL = 100


def rows() -> list[Row]:
    """Arrivals among 32 bins with and without a bound on the wait, and pulls among 1,000 sealed batches."""
    return [
        Row("Multi-Bin: arrival, 32 bins of 8", 1e3 * _arrival_s(math.inf), 0.05, "ms"),
        Row("Multi-Bin: arrival, 32 bins of 8, bounded wait", 1e3 * _arrival_s(1e9), 0.05, "ms"),
        Row("Multi-Bin: one of 1,000 sealed batches is pulled", 1e3 * _pull_s(), 2.0, "ms"),
    ]


def _arrival_s(max_wait_s: float) -> float:
    batcher = MultiBinBatcher(uniform_edges(1, 1024, 32), 8, max_wait_s)
    numbers = count()

    def arrive() -> None:
        for number in (next(numbers) for _ in range(PER_CALL)):
            batcher.add(Job(f"r{number}", 0.0, 100, 1 + 37 * number % 1024), 0.0)

    return median_s(arrive, 100) / PER_CALL


def _pull_s() -> float:
    batcher = MultiBinBatcher((1, 1024), 8)
    for number in range(8 * 1000):
        batcher.add(Job(f"r{number}", 0.0, 100, 100), float(number))
    return median_s(lambda: batcher.pull(1e9), 50)
