"""Runs behind the targets of the combined policy: its cells, and the policies that serve them, one replica each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from lab.reproduce.paper_settings import ARTIFACT, FIXED_QUANTUM, UNBOUND
from policies.compose import build_router, build_scheduler
from policies.replica.scheduler import ReplicaScheduler, SchedulerLimits
from policies.settings import PolicySettings
from simulator import predictors
from simulator.cluster.fleet import Fleet, FleetShape
from simulator.cluster.latency import A100_7B
from simulator.cluster.records import Record
from simulator.cluster.replica import ReplicaShape
from simulator.traffic.arrivals import Gamma, Poisson, rescale
from simulator.traffic.workload import SimRequest
from simulator.traffic.workloads import build_workload, retime

BLOCK_SIZE = 16
HOST_TOKENS = 262_144
STARVE_LIMITS_S = (30.0, math.inf)
"""The artifact's own 3 s was the worst or as good as the others in every cell that was run, and takes an hour where
many wait: each of them is promoted every 3 s."""


@dataclass(frozen=True, slots=True)
class CombinedCell:
    """A workload at a load on one replica.

    Attributes:
        workload: A name of ``simulator.traffic.workloads``.
        cv: Coefficient of variation of the gaps between arrivals of drawn workloads.
        sigma: Standard deviation of the forecasts' noise; None without forecasts.
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

    def arrivals(self, seed: int, index: int) -> list[SimRequest]:
        """The requests of a seed at the rate that makes the load; a trace gives another window for each index.

        A load of 1 is 0.85 N requests in the time in which FCFS that knows all lengths, all N queued at the start,
        ends 85 % of them.
        """
        requests = self._requests(seed, index)
        at_once = predictors.oracle(retime(requests, np.zeros(len(requests))))
        ends = sorted(record.finished_at for record in run(self, at_once, _OMNISCIENT))
        num_done = int(0.85 * len(ends))
        rate = self.load * num_done / ends[num_done - 1]
        if self.first_rows:
            return retime(requests, rescale(np.array([request.arrived_at for request in requests]), rate))
        process = Poisson(rate) if self.cv == 1.0 else Gamma(rate, self.cv)
        return retime(requests, process.sample(np.random.default_rng(seed + 1000), len(requests)))

    def _requests(self, seed: int, index: int) -> list[SimRequest]:
        """At the instants of their source."""
        rng = np.random.default_rng(seed)
        if not self.first_rows:
            return build_workload(self.workload, rng, self.num_requests)
        first = self.first_rows[index]
        window = build_workload(self.workload, rng, first + self.num_requests)[first:]
        return retime(window, np.array([each.arrived_at for each in window]) - window[0].arrived_at)

    def with_forecasts(self, arrivals: list[SimRequest], seed: int, forecasts: str) -> list[SimRequest]:
        """With forecasts that are ``given`` (as the cell says), ``shuffled`` among the requests, or ``none``."""
        if self.sigma is None or forecasts == "none":
            return predictors.history(arrivals)
        noisy = predictors.Noisy(self.sigma, seed)
        return predictors.Shuffled(noisy, seed)(arrivals) if forecasts == "shuffled" else noisy(arrivals)


@dataclass(frozen=True, slots=True)
class Policy:
    """A scheduler and its inputs.

    Attributes:
        look_every: Steps between two calls of the scheduler; 0: only at events.
        forecasts: As in ``CombinedCell.with_forecasts``.
    """

    make: Callable[[SchedulerLimits], ReplicaScheduler]
    look_every: int = 0
    forecasts: str = "given"


def _mlfq(starve_limit_s: float, limits: SchedulerLimits) -> ReplicaScheduler:
    config = replace(ARTIFACT, starve_limit_s=starve_limit_s)
    settings = PolicySettings(config, cost=A100_7B.cost, mlfq=FIXED_QUANTUM)
    return build_scheduler("fastserve", limits, settings)


def _hrrn(limits: SchedulerLimits) -> ReplicaScheduler:
    return build_scheduler("aggressive", limits, PolicySettings(UNBOUND, cost=A100_7B.cost), order="hrrn")


def _farsight(gamma: float, limits: SchedulerLimits) -> ReplicaScheduler:
    settings = PolicySettings(replace(UNBOUND, gamma=gamma), cost=A100_7B.cost)
    return build_scheduler("farsight-mean", limits, settings)


_PAST_FUTURE = partial(build_scheduler, "past-future", settings=PolicySettings(UNBOUND))
_OMNISCIENT = Policy(partial(_PAST_FUTURE, admission="oracle"), look_every=1)

POLICIES: dict[str, Policy] = {
    "past-future": Policy(_PAST_FUTURE, look_every=1),
    "hrrn": Policy(_hrrn),
    **{f"mlfq {limit:g} s": Policy(partial(_mlfq, limit), look_every=4) for limit in STARVE_LIMITS_S},
    "farsight-mean": Policy(partial(_farsight, 0.0), look_every=4),
    "farsight-mean, gamma 0.5": Policy(partial(_farsight, 0.5), look_every=4),
    "farsight-mean, shuffled": Policy(partial(_farsight, 0.0), look_every=4, forecasts="shuffled"),
    "farsight-mean, none": Policy(partial(_farsight, 0.0), look_every=4, forecasts="none"),
}


def replica_shape(cell: CombinedCell, look_every: int) -> ReplicaShape:
    """The one replica of a cell."""
    return ReplicaShape(
        num_blocks=cell.kv_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_host_blocks=HOST_TOKENS // BLOCK_SIZE,
        max_num_seqs=cell.max_num_seqs,
        max_batch_tokens=512 + cell.max_num_seqs,
        look_every=look_every,
    )


def run(cell: CombinedCell, arrivals: list[SimRequest], policy: Policy) -> list[Record]:
    shape = replica_shape(cell, policy.look_every)
    limits = SchedulerLimits(cell.max_num_seqs, standby_slots=0)
    return Fleet(FleetShape(shape, A100_7B), build_router("fcfs"), lambda index: policy.make(limits)).run(arrivals).done


@dataclass(frozen=True, slots=True)
class CombinedOutcome:
    """The results of one run.

    Attributes:
        good: Share of the requests with their first token within 10 s and no gap of 1.5 s or more.
    """

    jct_s: float
    p99_jct_s: float
    ttft_s: float
    good: float


def outcome(records: list[Record]) -> CombinedOutcome:
    jct_s = np.array([record.jct_s for record in records])
    return CombinedOutcome(
        float(jct_s.mean()),
        float(np.quantile(jct_s, 0.99)),
        float(np.mean([record.ttft_s for record in records])),
        float(np.mean([record.ttft_s < 10 and record.max_gap_s < 1.5 for record in records])),
    )


def outcomes(cell: CombinedCell, seed: int, index: int, names: Iterable[str]) -> dict[str, CombinedOutcome]:
    """Every policy on the same requests."""
    arrivals = cell.arrivals(seed, index)
    return {
        name: outcome(run(cell, cell.with_forecasts(arrivals, seed, POLICIES[name].forecasts), POLICIES[name]))
        for name in names
    }
