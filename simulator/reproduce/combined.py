"""Targets of the combined policy: mean JCT beside FCFS with Past-Future, skip-join MLFQ and HRRN, one replica.

Set-up: a 7B model on an A100 as a linear profile, prompts in chunks of 512 tokens beside the decodes, 25 GB/s to a host
of 262k tokens. A load of 1 is 0.85 N requests in the time in which FCFS, all N queued at the start, ends 85 % of them.
Skip-join MLFQ gets the best of three starvation limits in each cell, chosen on the evaluated runs, which favours it.

Forecasts: log-normal noise around the truth for the drawn lengths and the text tasks; none for the Azure traces, whose
prompt lengths say next to nothing of the outputs. The seeds are other ones than those on which the policy was found,
and so are two of three windows of the conversation trace; the code trace is too short for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from policies.builders import PolicySettings, build_router, build_scheduler
from policies.replica_scheduler import ReplicaScheduler, SchedulerLimits
from policies.skip_join_mlfq import MlfqRules
from simulator import predictors
from simulator.arrivals import Gamma, Poisson, rescale
from simulator.fleet import Fleet, FleetShape
from simulator.latency import A100_7B
from simulator.records import Record
from simulator.replica import ReplicaShape
from simulator.reproduce.rows import Reproduction, Row, holds
from simulator.traces import MissingTraceError
from simulator.workload import Arrival
from simulator.workloads import build_workload, retime

BLOCK_SIZE = 16
HOST_TOKENS = 262_144
STARVE_LIMITS_S = (3.0, 30.0, math.inf)
SEEDS = (11, 12, 13)


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload at a load on one replica.

    Attributes:
        workload: A name of ``simulator.workloads``.
        cv: Of the gaps between arrivals of drawn workloads.
        sigma: Of the forecasts' noise; None where nobody foresees anything.
        first_rows: Where the windows of a trace begin, one for each seed.
    """

    name: str
    workload: str
    load: float
    kv_tokens: int
    num_requests: int = 3000
    max_num_seqs: int = 256
    cv: float = 1.0
    sigma: float | None = 0.5
    first_rows: tuple[int, ...] = ()


def _requests(cell: Cell, seed: int, index: int) -> list[Arrival]:
    """The requests of a seed, at the instants of their source; a trace gives another window for each."""
    rng = np.random.default_rng(seed)
    if not cell.first_rows:
        return build_workload(cell.workload, rng, cell.num_requests)
    first = cell.first_rows[index]
    window = build_workload(cell.workload, rng, first + cell.num_requests)[first:]
    return retime(window, np.array([arrival.arrived_at for arrival in window]) - window[0].arrived_at)


def _foreseen(cell: Cell, arrivals: list[Arrival], seed: int) -> list[Arrival]:
    return predictors.history(arrivals) if cell.sigma is None else predictors.Noisy(cell.sigma, seed)(arrivals)


def _run(
    cell: Cell, arrivals: list[Arrival], make: Callable[[SchedulerLimits], ReplicaScheduler], look_every: int
) -> list[Record]:
    shape = ReplicaShape(
        num_blocks=cell.kv_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_host_blocks=HOST_TOKENS // BLOCK_SIZE,
        max_num_seqs=cell.max_num_seqs,
        max_batch_tokens=512 + cell.max_num_seqs,
        look_every=look_every,
    )
    limits = SchedulerLimits(cell.max_num_seqs, standby_slots=0)
    fleet = Fleet(FleetShape(shape, A100_7B), build_router("fcfs"), lambda index: make(limits))
    return fleet.run(arrivals).done


def _fcfs(limits: SchedulerLimits) -> ReplicaScheduler:
    return build_scheduler("aggressive", limits)


def _past_future(limits: SchedulerLimits) -> ReplicaScheduler:
    return build_scheduler("past-future", limits)


def _mlfq(starve_limit_s: float, limits: SchedulerLimits) -> ReplicaScheduler:
    settings = PolicySettings(mlfq=MlfqRules(starve_limit_s=starve_limit_s), cost=A100_7B.cost)
    return build_scheduler("fastserve", limits, settings)


def _hrrn(limits: SchedulerLimits) -> ReplicaScheduler:
    return build_scheduler("aggressive", limits, PolicySettings(cost=A100_7B.cost), order="hrrn")


def _farsight(gamma: float, limits: SchedulerLimits) -> ReplicaScheduler:
    return build_scheduler("farsight", limits, PolicySettings(cost=A100_7B.cost, gamma=gamma))


def _at_load(cell: Cell, arrivals: list[Arrival], seed: int) -> list[Arrival]:
    """The requests at the rate that makes this load."""
    at_once = retime(arrivals, np.zeros(len(arrivals)))
    ends = sorted(record.finished_at for record in _run(cell, at_once, _fcfs, look_every=0))
    num_done = int(0.85 * len(ends))
    rate = cell.load * num_done / ends[num_done - 1]
    if cell.first_rows:
        return retime(arrivals, rescale(np.array([arrival.arrived_at for arrival in arrivals]), rate))
    process = Poisson(rate) if cell.cv == 1.0 else Gamma(rate, cell.cv)
    return retime(arrivals, process.sample(np.random.default_rng(seed + 1000), len(arrivals)))


def _mean_jct_s(records: list[Record]) -> float:
    return float(np.mean([record.jct_s for record in records]))


def _good(records: list[Record]) -> float:
    return float(np.mean([record.ttft_s < 10 and record.max_gap_s < 1.5 for record in records]))


@dataclass(frozen=True, slots=True)
class Target:
    """Mean-JCT ratio of ours over another policy: as measured by the research, and what is to be reached."""

    against: str
    measured: float
    target: float


POLICIES: dict[str, tuple[Callable[[SchedulerLimits], ReplicaScheduler], int]] = {
    "past-future": (_past_future, 1),
    "hrrn": (_hrrn, 0),
    **{f"mlfq {limit:g} s": (partial(_mlfq, limit), 4) for limit in STARVE_LIMITS_S},
    "farsight": (partial(_farsight, 0.0), 4),
}


def cell_rows(cell: Cell, targets: tuple[Target, ...], num_seeds: int = len(SEEDS)) -> list[Row]:
    """Runs every policy on the same requests of each seed; one row a target."""
    setting = f"{cell.name} {cell.load:g}"
    wanted = {target.against for target in targets}
    try:
        runs = [_runs(cell, seed, i, wanted) for i, seed in enumerate(SEEDS[:num_seeds])]
    except MissingTraceError as error:
        return [
            Row("combined_targets", setting, f"jct / {each.against}", each.measured, math.nan, "exempt", str(error))
            for each in targets
        ]
    return [_row(setting, target, runs) for target in targets]


def _runs(cell: Cell, seed: int, index: int, wanted: set[str]) -> dict[str, float]:
    arrivals = _at_load(cell, _requests(cell, seed, index), seed)
    foreseen = _foreseen(cell, arrivals, seed)
    jct_s: dict[str, float] = {}
    for name, (make, look_every) in POLICIES.items():
        if name == "farsight" or name.split()[0] in wanted:
            jct_s[name] = _mean_jct_s(_run(cell, foreseen, make, look_every))
    return jct_s


def _row(setting: str, target: Target, runs: list[dict[str, float]]) -> Row:
    """The other policy at its best setting for the whole cell."""
    names = [name for name in runs[0] if name.split()[0] == target.against]
    best = min(names, key=lambda name: sum(run[name] for run in runs))
    ratios = [run["farsight"] / run[best] for run in runs]
    ours = math.exp(float(np.mean(np.log(ratios))))
    note = f"target <= {target.target:g}; seeds {min(ratios):.2f} to {max(ratios):.2f}; against {best}"
    return Row(
        "combined_targets",
        setting,
        f"jct / {target.against}",
        target.measured,
        ours,
        holds(ours <= target.target),
        note,
    )


CELLS: tuple[tuple[Cell, tuple[Target, ...]], ...] = (
    (
        Cell("i256", "apps8", 1.1, 30_000),
        (Target("past-future", 0.32, 0.40), Target("hrrn", 0.59, 0.65), Target("mlfq", 0.97, 1.00)),
    ),
    (
        Cell("zipf", "zipf", 0.9, 30_000, cv=4.0),
        (Target("past-future", 0.71, 0.80), Target("mlfq", 0.79, 0.87)),
    ),
    (
        Cell("zipf", "zipf", 1.1, 30_000, cv=4.0),
        (Target("past-future", 0.33, 0.42), Target("mlfq", 0.41, 0.50)),
    ),
    (
        Cell("code", "azure-code", 0.9, 121_000, num_requests=1000, sigma=None, first_rows=(0, 1000, 5000)),
        (Target("past-future", 0.42, 0.50), Target("mlfq", 0.55, 0.65)),
    ),
    (
        Cell("conv", "azure-conv", 1.1, 121_000, sigma=None, first_rows=(0, 7000, 10_000)),
        (Target("past-future", 0.59, 0.70), Target("mlfq", 0.47, 0.60)),
    ),
    (
        Cell("conv30", "azure-conv", 0.9, 30_000, sigma=None, first_rows=(0, 7000, 10_000)),
        (Target("past-future", 0.80, 0.92),),
    ),
    (Cell("D1", "d1", 1.3, 121_000, num_requests=400, sigma=0.15), (Target("past-future", 0.79, 0.85),)),
    (
        Cell("v", "apps8-alpaca", 1.1, 30_000),
        (Target("past-future", 0.31, 0.40), Target("mlfq", 0.97, 1.00)),
    ),
)

COMBINED = (
    Reproduction(
        "combined_targets",
        "the combined policy beside FCFS with Past-Future, skip-join MLFQ and HRRN",
        tuple(partial(cell_rows, cell, targets) for cell, targets in CELLS),
    ),
)
