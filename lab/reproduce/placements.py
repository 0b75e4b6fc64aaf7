"""Placements side by side on four replicas: E2 beside least work where nothing is shared, and E2 priced with forecasts
beside E2 where outputs are long.

A load of 1 is 0.85 N requests in the time in which round-robin (FCFS) ends 85 % of all N, queued at the start.
Forecasts are log-normal noise (sigma 0.5) around the truth. Every figure is the geometric mean of the paired seeds'
ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from farsight.policies.compose import build_router, build_scheduler
from farsight.policies.presets import find_preset
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.policies.settings import PolicySettings
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import A100_7B
from farsight.simulator.compare import paired_ratio
from farsight.simulator.predictors import Noisy
from farsight.simulator.traffic.arrivals import Gamma, Poisson
from farsight.simulator.traffic.prefixes import PROGRAMMING, TOOL_USE, PrefixLaw, prefix_workload
from farsight.simulator.traffic.workload import SimRequest
from farsight.simulator.traffic.workloads import build_workload, retime
from lab.reproduce.preble.runs import BLOCK, FOUR_A6000, SEATS, PrebleCluster
from lab.reproduce.rows import UNBOUND, Exempt, Own, Reproduction, Row, at_most

SEEDS = tuple(range(10))
SIGMA = 0.5
GAMMA = 0.0  # `farsight-mean` without ageing, as in the research; a server ages by 0.1
HOST_TOKENS = 262_144
FOUR_A100 = PrebleCluster("7b, 4 a100", 4, A100_7B, 121_000)

Draw = Callable[[np.random.Generator, int], list[SimRequest]]
"""(rng, number of requests) -> requests without their instants."""


@dataclass(frozen=True, slots=True)
class PlacementSystem:
    """A placement, or that of the preset if it is empty, in front of a preset's order, admission and KV policy."""

    preset: str
    placement: str = ""

    @property
    def name(self) -> str:
        return f"{self.placement} ({self.preset})" if self.placement else self.preset


@dataclass(frozen=True, slots=True)
class PlacementCell:
    """A workload at a load.

    Attributes:
        cv: Coefficient of variation of the gaps between arrivals.
    """

    name: str
    cluster: PrebleCluster
    draw: Draw
    load: float
    num_requests: int = 800
    cv: float = 1.0

    def arrivals(self, seed: int) -> list[SimRequest]:
        requests = retime(self.draw(np.random.default_rng(seed), self.num_requests), np.zeros(self.num_requests))
        ends = run(self.cluster, PlacementSystem("fcfs"), requests).finished_at
        num_done = int(0.85 * len(ends))
        rate = self.load * num_done / float(np.sort(ends)[num_done - 1])
        process = Poisson(rate) if self.cv == 1.0 else Gamma(rate, self.cv)
        arrivals = retime(requests, process.sample(np.random.default_rng(seed + 1000), self.num_requests))
        return Noisy(SIGMA, seed)(arrivals)


@dataclass(frozen=True, slots=True)
class PlacementTimes:
    """Seconds by request, in the order in which they ended."""

    jct_s: np.ndarray
    finished_at: np.ndarray

    def metric(self, name: str) -> float:
        return float(self.jct_s.mean() if name == "mean" else np.quantile(self.jct_s, 0.99))


def run(cluster: PrebleCluster, system: PlacementSystem, arrivals: Sequence[SimRequest]) -> PlacementTimes:
    """To the last token."""
    settings = PolicySettings(replace(UNBOUND, gamma=GAMMA), cost=cluster.latency.cost, block_size=BLOCK)
    limits = SchedulerLimits(SEATS, standby_slots=0)
    look_every = 4 if find_preset(system.preset).order == "gittins" else 0
    replica = replace(cluster.shape.replica, num_host_blocks=HOST_TOKENS // BLOCK, look_every=look_every)
    fleet = Fleet(
        FleetShape(replica, cluster.latency, cluster.num_replicas),
        build_router(system.preset, system.placement, settings),
        lambda index: build_scheduler(system.preset, limits, settings),
    )
    done = fleet.run(arrivals).done
    return PlacementTimes(np.array([each.jct_s for each in done]), np.array([each.finished_at for each in done]))


def rows(
    name: str,
    cell: PlacementCell,
    contests: Sequence[tuple[PlacementSystem, PlacementSystem]],
    limit: float,
    seeds: Sequence[int] = SEEDS,
) -> list[Row]:
    """Each contest's first system over its second on the same requests, the mean and p99 of the JCT; the mean is
    judged."""
    systems = dict.fromkeys(system for contest in contests for system in contest)
    runs: list[dict[PlacementSystem, PlacementTimes]] = []
    for seed in seeds:
        arrivals = cell.arrivals(seed)
        runs.append({system: run(cell.cluster, system, arrivals) for system in systems})
    found = []
    for ours, base in contests:
        for metric in ("mean", "p99"):
            ratio = paired_ratio([(each[ours].metric(metric), each[base].metric(metric)) for each in runs])
            assert ratio is not None, "all are above 0"
            check = Own(at_most(limit)) if metric == "mean" else Exempt("no target was set for it")
            between = "" if ratio.low is None else f"; 95 %: {ratio.low:.3f} to {ratio.high:.3f}"
            note = f"{len(runs)} seeds{between}"
            setting = f"{cell.name}, {cell.cluster.name}, load {cell.load:g}"
            metric_name = f"{metric}: {ours.name} / {base.name}"
            found.append(Row(name, setting, metric_name, check, ratio.mean, note))
    return found


REASONING = PrefixLaw("reasoning", TOOL_USE.prompt, 600, TOOL_USE.shared, TOOL_USE.levels)
"""Tool prompts whose answers think aloud; 600 tokens are assumed."""


def _prefixed(law: PrefixLaw, num_prefixes: int, rng: np.random.Generator, num_requests: int) -> list[SimRequest]:
    return prefix_workload(rng, [0.0] * num_requests, law, num_prefixes, BLOCK)


def _named(name: str, rng: np.random.Generator, num_requests: int) -> list[SimRequest]:
    return build_workload(name, rng, num_requests)


PROGRAMS = PlacementCell("program", FOUR_A6000, partial(_prefixed, PROGRAMMING, 320), 0.9)
REASONS = PlacementCell("reasoning", FOUR_A6000, partial(_prefixed, REASONING, 400), 0.9)
CHATS = PlacementCell("sharegpt-like", FOUR_A100, partial(_named, "sharegpt-like"), 0.9)
HEAVY = PlacementCell("zipf, CV 4", replace(FOUR_A100, capacity=30_000), partial(_named, "zipf"), 0.9, cv=4.0)

LONG = tuple(replace(cell, load=load) for cell in (PROGRAMS, REASONS, CHATS, HEAVY) for load in (0.8, 1.1))
"""Long outputs: of 190 tokens and more."""

ALONE = tuple(replace(cell, load=load) for cell in (CHATS, HEAVY) for load in (0.8, 1.1))
"""Nothing is shared."""

CONTESTS = (
    (PlacementSystem("farsight-mean"), PlacementSystem("farsight-mean", "e2")),
    (PlacementSystem("preble", "e2-forecast"), PlacementSystem("preble")),
    (PlacementSystem("farsight-mean"), PlacementSystem("preble")),
)

PLACEMENTS = (
    Reproduction(
        "placement_unshared",
        "E2 beside least work without shared prefixes",
        tuple(
            partial(
                rows,
                "placement_unshared",
                cell,
                [(PlacementSystem("preble"), PlacementSystem("preble", "least-work"))],
                1.03,
            )
            for cell in ALONE
        ),
    ),
    Reproduction(
        "placement_forecasts",
        "E2 priced with forecasts beside E2, long outputs",
        tuple(partial(rows, "placement_forecasts", cell, CONTESTS, 1.0) for cell in LONG),
    ),
)
