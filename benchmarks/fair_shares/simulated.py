"""Two tenants on one simulated replica, under every preset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from farsight.core.config.scheduling import SchedulerConfig
from farsight.simulator.experiment import Experiment
from farsight.simulator.predictors import Noisy
from farsight.simulator.run import RunOutcome, run
from farsight.simulator.traffic.workload import SimRequest
from farsight.simulator.traffic.workloads import build_workload

PRESETS = ("fcfs", "fastserve", "past-future", "preble", "farsight", "magnus", "multi-bin")
NEIGHBOUR = 10
CAPACITY_OF = {"fastserve": "fcfs"}
"""Presets that take another one's capacity: with 1,000 requests at once FastServe moves KV more than it computes."""

MAX_P99_RATIO = 1.3
MIN_THROUGHPUT = 0.98


@dataclass(frozen=True, slots=True)
class Sizes:
    """
    Attributes:
        load: The small tenant's, as a share of what the replica serves under the preset.
        num_requests: The small tenant's.
        max_num_seqs: Sequences of a step: the more, the slower each becomes where the replica is full.
    """

    workload: str
    load: float
    num_requests: int
    max_num_seqs: int
    seed: int


@dataclass(frozen=True, slots=True)
class Shares:
    """The small tenant's 99th percentiles in seconds, and the output tokens per second of both tenants.

    Attributes:
        beside_equal: JCT beside a neighbour of its own load.
        beside_flood, unfair: JCT beside ten times its load, with fair shares and without.
        fair_rate, unfair_rate: Output tokens per second from the first arrival to the last token.
    """

    preset: str
    beside_equal: float
    beside_flood: float
    unfair: float
    ttft_equal: float
    ttft_flood: float
    ttft_unfair: float
    fair_rate: float
    unfair_rate: float

    @property
    def ratio(self) -> float:
        return self.beside_flood / self.beside_equal

    @property
    def throughput(self) -> float:
        return self.fair_rate / self.unfair_rate

    @property
    def holds(self) -> bool:
        return self.ratio <= MAX_P99_RATIO and self.throughput >= MIN_THROUGHPUT

    def row(self) -> str:
        return (
            f"| {self.preset} | {self.beside_equal:.1f} | {self.beside_flood:.1f} | {self.ratio:.2f} | "
            f"{self.unfair:.1f} | {self.ttft_equal:.2f} | {self.ttft_flood:.2f} | {self.ttft_unfair:.2f} | "
            f"{self.throughput:.3f} | {'yes' if self.holds else 'no'} |"
        )


COLUMNS = (
    *("preset", "JCT p99 beside its own load, s", "beside 10 x, s", "ratio", "unfair, s", "TTFT p99, s", "beside 10 x"),
    *("unfair", "throughput, fair / unfair", "holds"),
)
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def measure(preset: str, sizes: Sizes) -> Shares:
    """All runs of one preset, on the same draws."""
    experiment = Experiment(
        scheduler=SchedulerConfig(preset=preset),
        workload=sizes.workload,
        seed=sizes.seed,
        max_num_seqs=sizes.max_num_seqs,
    )
    measured = experiment.under(CAPACITY_OF.get(preset, preset))
    rate = sizes.load * capacity(measured, sizes)
    small = _tenant("small", rate, sizes.num_requests, sizes, 0)
    equal = _tenant("neighbour", rate, sizes.num_requests, sizes, 1)
    flood = _tenant("neighbour", NEIGHBOUR * rate, NEIGHBOUR * sizes.num_requests, sizes, 2)
    beside_equal = run(experiment, _merged(small, equal))
    fair = run(experiment, _merged(small, flood))
    unfair = run(experiment, [replace(each, tenant="") for each in _merged(small, flood)])
    return Shares(
        preset,
        beside_equal=_p99(beside_equal, "jct_s"),
        beside_flood=_p99(fair, "jct_s"),
        unfair=_p99(unfair, "jct_s"),
        ttft_equal=_p99(beside_equal, "ttft_s"),
        ttft_flood=_p99(fair, "ttft_s"),
        ttft_unfair=_p99(unfair, "ttft_s"),
        fair_rate=fair.summary.output_tokens_per_s,
        unfair_rate=unfair.summary.output_tokens_per_s,
    )


def capacity(experiment: Experiment, sizes: Sizes) -> float:
    """Requests per second while many wait."""
    at_once = _tenant("all", math.inf, 1000, sizes, 3)
    ends = sorted(record.finished_at for record in run(experiment, at_once).recorder.done)
    num_done = int(0.85 * len(ends))
    return num_done / ends[num_done - 1]


def _tenant(name: str, rate: float, num_requests: int, sizes: Sizes, stream: int) -> list[SimRequest]:
    rng = np.random.default_rng((sizes.seed, stream))
    drawn = build_workload(sizes.workload, rng, num_requests, None if rate == math.inf else rate)
    named = [replace(each, request_id=f"{name}-{each.request_id}", tenant=name) for each in drawn]
    return list(Noisy(0.5, seed=sizes.seed + stream)(named))


def _merged(*tenants: Sequence[SimRequest]) -> list[SimRequest]:
    return sorted((each for tenant in tenants for each in tenant), key=lambda each: each.arrived_at)


def _p99(outcome: RunOutcome, figure: str) -> float:
    values = [getattr(each, figure) for each in outcome.recorder.done if each.arrival.request_id.startswith("small-")]
    return float(np.percentile(values, 99))
