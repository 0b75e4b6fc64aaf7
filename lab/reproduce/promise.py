"""How well the promises of ends hold: coverage of their quantiles, and their error beside known laws of lengths.

One replica at load 0.9. ``given`` is what a server has; ``known`` is the same roll-out with the law from which the
request's length was drawn as its forecast. Conversations come without forecasts, so the replica learns the law of
lengths from what ends; tasks come with the quantiles of 50 earlier outputs of their task.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from farsight.core.forecast import QUANTILES, Forecast
from farsight.policies.compose import build_router, build_scheduler
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.policies.settings import PolicySettings
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import A100_7B
from farsight.simulator.traffic.lengths import SHAREGPT_LIKE, LengthLaw, LogNormal
from farsight.simulator.traffic.workload import SimRequest
from lab.reproduce.combined import CombinedCell, replica_shape
from lab.reproduce.rows import UNBOUND, Own, Reproduction, Row, at_most, between

FloatArray = NDArray[np.float64]

PRESETS = ("fcfs", "farsight")
SEED = 21
NUM_REQUESTS = 4000
NUM_EARLIER = 50
"""Outputs of a task from which its forecast is made."""

BAND, P90, WORST_RATIO = between(0.36, 0.44), between(0.87, 0.93), 1.25

TASKS: tuple[tuple[LogNormal, LogNormal], ...] = (
    (LogNormal(60, 0.4, 256), LogNormal(40, 0.5, 1024)),
    (LogNormal(120, 0.5, 1024), LogNormal(120, 0.6, 1024)),
    (LogNormal(400, 0.8, 2048), LogNormal(60, 0.9, 1024)),
    (LogNormal(200, 0.6, 1024), LogNormal(350, 0.7, 1024)),
)
"""Prompts and outputs of each task."""

Laws = Literal["given", "known"]


@dataclass(frozen=True, slots=True)
class PromiseCell(CombinedCell):
    """Requests whose law of lengths is known.

    Attributes:
        has_forecasts: Whether these are tasks, which come with forecasts from earlier outputs of their task.
    """

    has_forecasts: bool = False

    def _requests(self, seed: int, index: int) -> list[SimRequest]:
        if not self.has_forecasts:
            # Spelled out: a dataclass with slots is made twice, and super() knows the first.
            return CombinedCell._requests(self, seed, index)
        rng = np.random.default_rng(seed)
        return [_task_request(rng, number) for number in range(self.num_requests)]

    def with_laws(self, arrivals: list[SimRequest], laws: Laws) -> list[SimRequest]:
        """With forecasts as a server has them, or with those of the true laws."""
        if laws == "given" and not self.has_forecasts:
            return arrivals
        rng = np.random.default_rng(SEED + 1)
        num = NUM_EARLIER if laws == "given" else 100_000
        forecasts = {app: _forecast(self._law_of(app).sample(rng, num)) for app in {each.app for each in arrivals}}
        return [dataclasses.replace(each, forecast=forecasts[each.app]) for each in arrivals]

    def _law_of(self, app: str) -> LengthLaw:
        """The law from which the outputs of these requests are drawn."""
        return TASKS[int(app)][1] if self.has_forecasts else SHAREGPT_LIKE.output


def _task_request(rng: np.random.Generator, number: int) -> SimRequest:
    task = int(rng.integers(len(TASKS)))
    prompt, output = (int(law.sample(rng, 1)[0]) for law in TASKS[task])
    return SimRequest(f"task-{number}", 0.0, prompt, output, 1024, app=str(task))


def _forecast(lengths: NDArray[np.int64]) -> Forecast:
    quantiles = tuple(float(length) for length in np.quantile(lengths, QUANTILES))
    return Forecast(float(lengths.mean()), quantiles, len(lengths), "earlier", 1)


@dataclass(frozen=True, slots=True)
class PromiseOutcome:
    """What became of the promises of one run.

    Attributes:
        band: Share of ends between p50 and p90.
        p90: Share of ends up to p90.
        error_s: Median distance of p50 from the end.
    """

    num: int
    band: float
    p90: float
    error_s: float


def promises(cell: CombinedCell, arrivals: list[SimRequest], preset: str) -> PromiseOutcome:
    """Runs the requests and compares each promise with the end."""
    limits = SchedulerLimits(cell.max_num_seqs, standby_slots=0)
    settings = PolicySettings(UNBOUND, cost=A100_7B.cost)
    shape = dataclasses.replace(replica_shape(cell, 0 if preset == "fcfs" else 4), promises=True)
    fleet = Fleet(FleetShape(shape, A100_7B), build_router("fcfs"), lambda _: build_scheduler(preset, limits, settings))
    told = [(each.promise, each.jct_s) for each in fleet.run(arrivals).done if each.promise is not None]
    p50_s, p90_s, end_s = np.array([(promise.p50_s, promise.p90_s, end_s) for promise, end_s in told]).T
    return PromiseOutcome(
        len(told),
        float(((end_s > p50_s) & (end_s <= p90_s)).mean()),
        float((end_s <= p90_s).mean()),
        float(np.median(np.abs(end_s - p50_s))),
    )


def cell_rows(cell: PromiseCell, preset: str) -> list[Row]:
    arrivals = cell.arrivals(SEED, 0)
    given = promises(cell, cell.with_laws(arrivals, "given"), preset)
    known = promises(cell, cell.with_laws(arrivals, "known"), preset)
    row = partial(Row, "promise", f"{cell.name} {cell.load:g}, {preset}")
    note = f"{given.num:,} requests"
    return [
        row("ends between p50 and p90", Own(BAND), given.band, note),
        row("ends up to p90", Own(P90), given.p90, note),
        row("error of p50 / known law", Own(at_most(WORST_RATIO)), given.error_s / known.error_s, _error(given)),
    ]


def _error(outcome: PromiseOutcome) -> str:
    return f"median error {outcome.error_s:.2f} s"


CELLS = (
    PromiseCell("conversations", "sharegpt-like", 0.9, 121_000, NUM_REQUESTS, sigma=None),
    PromiseCell("conversations, little memory", "sharegpt-like", 0.9, 30_000, NUM_REQUESTS, sigma=None),
    PromiseCell("tasks", "", 0.9, 30_000, NUM_REQUESTS, sigma=None, has_forecasts=True),
)

PROMISE = (
    Reproduction(
        "promise",
        "when a request will end, as told on its arrival: coverage, and error beside known laws of lengths",
        tuple(partial(cell_rows, cell, preset) for cell in CELLS for preset in PRESETS),
    ),
)
