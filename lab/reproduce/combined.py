"""Targets of the combined policy: beside FCFS with Past-Future, skip-join MLFQ and HRRN, one replica.

Set-up: a 7B model on an A100 as a linear profile, prompts in chunks of 512 tokens beside the decodes, 25 GB/s to a host
of 262k tokens. Skip-join MLFQ gets the better of two starvation limits in each cell, chosen on the evaluated runs,
which favours it.

Forecasts: log-normal noise around the truth for the drawn lengths and the text tasks; none for the Azure traces, whose
prompt lengths say next to nothing of the outputs. The seeds are other ones than those on which the policy was found,
and so are two of three windows of the conversation trace; the code trace is too short for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from lab.reproduce.combined_runs import POLICIES, CombinedCell, CombinedOutcome, outcomes
from lab.reproduce.rows import Exempt, Own, Reproduction, Row, at_least, at_most
from simulator.traffic.traces import MissingTraceError

SEEDS = (11, 12, 13)

Runs = Sequence[dict[str, CombinedOutcome]]
"""Outcomes by policy, one mapping a seed."""


@dataclass(frozen=True, slots=True)
class RatioTarget:
    """A figure that must not be above ``limit``, as a ratio to that of another policy.

    Attributes:
        against: A policy of ``POLICIES``; ``mlfq`` is its best starvation limit, ``best`` the best of all others.
        measured: By the research; NaN where it says none.
        metric: A field of ``CombinedOutcome``.
    """

    against: str
    measured: float
    limit: float
    ours: str = "farsight-mean"
    metric: str = "jct_s"

    @property
    def names(self) -> set[str]:
        """Names of the policies that must run."""
        others = {name for name in POLICIES if not name.startswith("farsight-mean")}
        wanted = others if self.against == "best" else {n for n in POLICIES if n in _candidates(self.against)}
        return {self.ours, *wanted}

    def row(self, setting: str, runs: Runs) -> Row:
        names = [name for name in runs[0] if name in (self.names - {self.ours})]
        best = min(names, key=lambda name: sum(self._value(each[name]) for each in runs))
        ratios = [self._value(each[self.ours]) / self._value(each[best]) for each in runs]
        ratio = math.exp(float(np.mean(np.log(ratios))))
        note = f"{_research(self.measured)}seeds {min(ratios):.2f} to {max(ratios):.2f}; against {best}"
        metric = f"{self.ours}: {self.metric.removesuffix('_s')} / {self.against}"
        return Row("combined_targets", setting, metric, Own(at_most(self.limit)), ratio, note)

    def _value(self, outcome: CombinedOutcome) -> float:
        return float(getattr(outcome, self.metric))


@dataclass(frozen=True, slots=True)
class GoodputTarget:
    """A share of good requests that must be reached."""

    measured: float
    least: float
    names = frozenset({"farsight-mean"})

    def row(self, setting: str, runs: Runs) -> Row:
        good = float(np.mean([each["farsight-mean"].good for each in runs]))
        note = f"{_research(self.measured)}gamma 0"
        return Row("combined_targets", setting, "farsight-mean: good", Own(at_least(self.least)), good, note)


def _research(measured: float) -> str:
    return "" if math.isnan(measured) else f"research {measured:g}; "


def _candidates(against: str) -> set[str]:
    return {name for name in POLICIES if name == against or (against == "mlfq" and name.startswith("mlfq "))}


def cell_rows(
    cell: CombinedCell, targets: Sequence[RatioTarget | GoodputTarget], num_seeds: int = len(SEEDS)
) -> list[Row]:
    """Runs every policy that a target names on the same requests of each seed; one row a target."""
    setting = f"{cell.name} {cell.load:g}"
    names = [name for name in POLICIES if any(name in target.names for target in targets)]
    try:
        runs = [outcomes(cell, seed, i, names) for i, seed in enumerate(SEEDS[:num_seeds])]
    except MissingTraceError as error:
        return [Row("combined_targets", setting, "", Exempt(str(error)), math.nan)]
    return [target.row(setting, runs) for target in targets]


TEXTS = CombinedCell("i256", "apps8", 1.1, 30_000)
ZIPF = CombinedCell("zipf", "zipf", 1.1, 30_000, cv=4.0)
CODE = CombinedCell("code", "azure-code", 0.9, 121_000, num_requests=1500, sigma=None, first_rows=(0, 1500, 4500))
CONV = CombinedCell("conv", "azure-conv", 1.1, 121_000, sigma=None, first_rows=(0, 7000, 10_000))
D1 = CombinedCell("D1", "d1", 1.3, 121_000, num_requests=400, sigma=0.15)
MIXED = CombinedCell("v", "apps8-alpaca", 1.1, 30_000)

_ROBUST = RatioTarget("farsight-mean, none", math.nan, 1.02, ours="farsight-mean, shuffled")
"""A useless predictor must not cost more than 2 % over none."""

_LIGHT = RatioTarget("best", math.nan, 1.01)
"""With hardly a queue, no other policy may be better by more than 1 %."""

CELLS: tuple[tuple[CombinedCell, tuple[RatioTarget | GoodputTarget, ...]], ...] = (
    (
        TEXTS,
        (
            RatioTarget("past-future", 0.32, 0.40),
            RatioTarget("hrrn", 0.59, 0.65),
            RatioTarget("mlfq", 0.97, 1.00),
            _ROBUST,
        ),
    ),
    (replace(ZIPF, load=0.9), (RatioTarget("past-future", 0.71, 0.80), RatioTarget("mlfq", 0.79, 0.87), _ROBUST)),
    (ZIPF, (RatioTarget("past-future", 0.33, 0.42), RatioTarget("mlfq", 0.41, 0.50), _ROBUST)),
    (CODE, (RatioTarget("past-future", 0.42, 0.50), RatioTarget("mlfq", 0.55, 0.65))),
    (
        CONV,
        (
            RatioTarget("past-future", 0.59, 0.70),
            RatioTarget("mlfq", 0.47, 0.60),
            GoodputTarget(0.926, 0.85),
            RatioTarget("past-future", 0.71, 0.80, ours="farsight-mean, gamma 0.5"),
            RatioTarget("past-future", 1.27, 1.50, ours="farsight-mean, gamma 0.5", metric="p99_jct_s"),
        ),
    ),
    (replace(CONV, name="conv30", load=0.9, kv_tokens=30_000), (RatioTarget("past-future", 0.80, 0.92),)),
    (D1, (RatioTarget("past-future", 0.79, 0.85), _ROBUST)),
    (MIXED, (RatioTarget("past-future", 0.31, 0.40), RatioTarget("mlfq", 0.97, 1.00), _ROBUST)),
    *((replace(cell, load=0.7), (_LIGHT,)) for cell in (TEXTS, ZIPF, CODE, CONV, MIXED)),
)

COMBINED = (
    Reproduction(
        "combined_targets",
        "the combined policy beside FCFS with Past-Future, skip-join MLFQ and HRRN",
        tuple(partial(cell_rows, cell, targets) for cell, targets in CELLS),
    ),
)
