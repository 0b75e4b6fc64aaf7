"""Mean and tail of the boosted order beside FCFS with Past-Future, and what no schedule could beat.

The cells are those of ``combined_targets`` at four loads, with other seeds and ten windows of a trace. Windows of the
traces overlap, since a trace is no longer than that. In overload the mean, the 99th and the 99.9th percentile (of all
runs together) are compared with FCFS under Past-Future, pauses with ``fcfs``; at light loads mean and 99th percentile
with the best of all policies, each by its own best.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from farsight.policies.compose import build_scheduler
from farsight.policies.settings import PolicySettings
from farsight.simulator.cluster.latency import A100_7B
from farsight.simulator.traffic.traces import MissingTraceError
from farsight.simulator.traffic.workload import SimRequest
from lab.reproduce.combined import CODE, CONV, D1, MIXED, POLICIES, TEXTS, ZIPF, CombinedCell, Policy, run
from lab.reproduce.frontier import MeanBound, ReplicaBounds, shares, tail_bound, workload
from lab.reproduce.rows import UNBOUND, Exempt, Figure, Own, Reproduction, Row, at_most

FloatArray = NDArray[np.float64]

SEEDS = tuple(range(100, 110))
OVERLOADS = (1.1, 1.3)
LIGHT_LOADS = (0.7, 0.9)


def farsight(tail: float = 1.0) -> Policy:
    """The preset, without forecasts of its own."""
    settings = PolicySettings(dataclasses.replace(UNBOUND, tail=tail), cost=A100_7B.cost)
    return Policy(partial(build_scheduler, "farsight", settings=settings), look_every=4)


BASELINE, OURS = "past-future", "farsight"
_FCFS = Policy(partial(build_scheduler, "fcfs", settings=PolicySettings(UNBOUND)))
_POLICIES = POLICIES | {OURS: farsight(), "fcfs": _FCFS}
_IN_OVERLOAD = (BASELINE, OURS, "fcfs")
_AT_LIGHT_LOADS = (BASELINE, "hrrn", "mlfq 30 s", "mlfq inf s", "farsight-mean", OURS)


@dataclass(frozen=True, slots=True)
class TailSample:
    """One run: completion times and longest pauses of all requests; seconds, shape (n,)."""

    jct_s: FloatArray
    pause_s: FloatArray
    ended_at: float

    @property
    def mean_s(self) -> float:
        return float(self.jct_s.mean())

    @property
    def p99_s(self) -> float:
        return float(np.quantile(self.jct_s, 0.99))


TailSamples = Sequence[TailSample]
"""The runs of one policy, one a seed."""


def samples(cell: CombinedCell, seed: int, index: int, names: Sequence[str]) -> dict[str, TailSample]:
    """Every policy on the same requests."""
    arrivals = cell.arrivals(seed, index)
    return {name: _sample(cell, arrivals, seed, _POLICIES[name]) for name in names}


def _sample(cell: CombinedCell, arrivals: list[SimRequest], seed: int, policy: Policy) -> TailSample:
    records = run(cell, cell.with_forecasts(arrivals, seed, policy.forecasts), policy)
    return TailSample(
        np.array([record.jct_s for record in records]),
        np.array([record.max_gap_s for record in records]),
        max(record.finished_at for record in records),
    )


def overload_rows(cell: CombinedCell, most_of_mean: float, seeds: Sequence[int] = SEEDS) -> list[Row]:
    """The targets of one cell in overload, and the bounds of the first seed's run."""
    setting = f"{cell.name} {cell.load:g}"
    try:
        runs = [samples(cell, seed, index, _IN_OVERLOAD) for index, seed in enumerate(seeds)]
    except MissingTraceError as error:
        return [Row("tail_targets", setting, "", Exempt(str(error)), math.nan)]
    by_name = {name: [each[name] for each in runs] for name in _IN_OVERLOAD}
    base, ours, fcfs = (by_name[name] for name in (BASELINE, OURS, "fcfs"))
    mean_bound_s, tail_bound_s = bounds(cell, cell.arrivals(seeds[0], 0), base[0])
    num = sum(len(each.jct_s) for each in ours)
    return [
        _ratio_row(setting, "mean", _mean_s, ours, base, most_of_mean, f"bound {mean_bound_s / base[0].mean_s:.2f}"),
        _ratio_row(setting, "p99", _p99_s, ours, base, 1.2, f"bound {tail_bound_s / base[0].p99_s:.2f}"),
        _row(setting, "p99.9", _pooled(ours, 0.999) / _pooled(base, 0.999), at_most(1.4), f"{num:,} requests"),
        _row(setting, "pause p99 / fcfs", _pause_s(ours) / _pause_s(fcfs), at_most(2.0), f"{_pause_s(ours):.2f} s"),
    ]


def light_rows(cell: CombinedCell, seeds: Sequence[int] = SEEDS) -> list[Row]:
    """Mean and 99th percentile beside the best policy of each."""
    setting = f"{cell.name} {cell.load:g}"
    try:
        runs = [samples(cell, seed, index, _AT_LIGHT_LOADS) for index, seed in enumerate(seeds)]
    except MissingTraceError as error:
        return [Row("tail_targets", setting, "", Exempt(str(error)), math.nan)]
    rows = []
    for metric, value in (("mean", _mean_s), ("p99", _p99_s)):
        others = [name for name in _AT_LIGHT_LOADS if name != OURS]
        best = min(others, key=lambda name: sum(value(each[name]) for each in runs))
        ours, theirs = ([each[name] for each in runs] for name in (OURS, best))
        rows.append(_ratio_row(setting, f"{metric} / best", value, ours, theirs, 1.01, f"against {best}"))
    return rows


def bounds(cell: CombinedCell, arrivals: list[SimRequest], base: TailSample) -> tuple[float, float]:
    """Lower bounds of mean and 99th percentile of these requests, seconds."""
    replica = ReplicaBounds(A100_7B.cost, cell.max_num_seqs, cell.kv_tokens, 512 + cell.max_num_seqs)
    loads = [workload(arrivals, replica, weights) for weights in shares()]
    tails = [tail_bound(load, 0.99) for load in loads]
    tightest = loads[int(np.argmax(tails))]
    balanced = loads[int(np.argmax([float(load.work_s.sum()) for load in loads]))]
    mean_s = max(MeanBound(load, base.ended_at).solve(base.mean_s) for load in (tightest, balanced))
    return mean_s, max(tails)


def _mean_s(sample: TailSample) -> float:
    return sample.mean_s


def _p99_s(sample: TailSample) -> float:
    return sample.p99_s


def _pooled(runs: TailSamples, share: float) -> float:
    return float(np.quantile(np.concatenate([each.jct_s for each in runs]), share))


def _pause_s(runs: TailSamples) -> float:
    return float(np.quantile(np.concatenate([each.pause_s for each in runs]), 0.99))


def _ratio_row(
    setting: str,
    metric: str,
    value: Callable[[TailSample], float],
    ours: TailSamples,
    theirs: TailSamples,
    limit: float,
    note: str,
) -> Row:
    """The geometric mean of paired ratios."""
    ratios = [value(mine) / value(other) for mine, other in zip(ours, theirs, strict=True)]
    ratio = math.exp(float(np.mean(np.log(ratios))))
    return _row(setting, metric, ratio, at_most(limit), f"{min(ratios):.2f} to {max(ratios):.2f}; {note}")


def _row(setting: str, metric: str, ratio: float, limit: Figure, note: str) -> Row:
    return Row("tail_targets", setting, f"{OURS}: {metric}", Own(limit), ratio, note)


CELLS: tuple[tuple[CombinedCell, float], ...] = (
    (replace(CONV, first_rows=tuple(range(0, 10_000, 1111))), 0.8),
    (ZIPF, 0.8),
    (replace(CODE, first_rows=tuple(range(0, 4501, 500))), 0.8),
    (D1, 0.9),
    (TEXTS, 1.0),
    (MIXED, 1.0),
)
"""Cells, and the most that the mean may be of FCFS with Past-Future's in overload."""

TAIL = (
    Reproduction(
        "tail_targets",
        "mean and tail of the boosted order beside FCFS with Past-Future, and lower bounds of both",
        (
            *(partial(overload_rows, replace(cell, load=load), most) for cell, most in CELLS for load in OVERLOADS),
            *(partial(light_rows, replace(cell, load=load)) for cell, _ in CELLS for load in LIGHT_LOADS),
        ),
    ),
)
