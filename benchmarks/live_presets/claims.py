"""The claims about live service, each with its criterion."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.live_presets.runs import Figures
from farsight.simulator.compare import Interval, interval, paired_ratio

Lookup = Callable[[str, int, bool], Figures]
"""(system, seed, live) -> its figures."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure of one system beside another one's, in the same setup.

    Attributes:
        metric: A field of ``Figures``.
        base: The system that it is compared with; empty: the metric itself is judged, as a mean.
        target: Target of the ratio.
        at_most: Whether the target is the most; else the least.
        to_simulation: The ratio of the live ratio to the simulated one is judged.
    """

    name: str
    setup: str
    ours: str
    base: str
    metric: str
    target: float
    at_most: bool = True
    to_simulation: bool = False

    @property
    def systems(self) -> tuple[str, ...]:
        return (self.ours, self.base) if self.base else (self.ours,)

    def row(self, seeds: Sequence[int], num_requests: int, figures: Lookup) -> dict[str, Any]:
        """The claim, what was found and whether it holds.

        ``verdict`` is ``holds`` if the ratio meets the target, ``off`` if its whole interval misses it, else ``open``;
        ``not served`` if the service refuses a system, ``disturbed`` if other work on the machine has spoilt a run.
        """
        head = {"claim": self.name, "target": f"{'<=' if self.at_most else '>='} {self.target:g}"}
        tail = {"seeds": len(seeds), "requests": num_requests}
        refused = next((why for each in self.systems if (why := figures(each, seeds[0], True).refused)), "")
        if refused:
            return head | {"ratio": None, "low": None, "high": None, "verdict": "not served", "why": refused} | tail
        live = [self._value(seed, figures, live=True) for seed in seeds]
        simulated = [self._value(seed, figures, live=False) for seed in seeds]
        found = _over_seeds(live, is_ratio=bool(self.base))
        predicted = _over_seeds(simulated, is_ratio=bool(self.base))
        judged = found
        if self.to_simulation:
            judged = _over_seeds([a / b for a, b in zip(live, simulated, strict=True)], is_ratio=True)
        limits = {"ratio": judged.mean, "low": judged.low, "high": judged.high}
        shown = {"live": found.mean, "simulated": None if math.isnan(predicted.mean) else predicted.mean}
        runs = [figures(each, seed, True) for each in self.systems for seed in seeds]
        verdict = self._verdict(judged) if all(run.counts for run in runs) else "disturbed"
        shown |= {"gap_ms": 1e3 * fmean(run.gap_s for run in runs), "lag_ms": 1e3 * max(run.lag_s for run in runs)}
        return head | limits | {"verdict": verdict} | shown | tail

    def _value(self, seed: int, figures: Lookup, *, live: bool) -> float:
        ours, *base = (float(getattr(figures(each, seed, live), self.metric)) for each in self.systems)
        if not base:
            return ours
        return ours / base[0] if base[0] else math.nan

    def _verdict(self, judged: Interval) -> str:
        sign = 1 if self.at_most else -1
        if sign * judged.mean <= sign * self.target:
            return "holds"
        bounds = [bound for bound in (judged.low, judged.high) if bound is not None]
        return "open" if any(sign * bound <= sign * self.target for bound in bounds) else "off"


def _over_seeds(values: Sequence[float], *, is_ratio: bool) -> Interval:
    """With a 95 % interval; NaN where a run gives none."""
    if any(math.isnan(value) for value in values):
        return Interval(math.nan, None, None)
    if is_ratio and all(value > 0 for value in values):
        ratio = paired_ratio([(value, 1.0) for value in values])
        assert ratio is not None, "all are above 0"
        return ratio
    return interval(values)


def _like_simulation(setup: str, base: str) -> Claim:
    name = f"farsight-mean / {base}, {setup}: live / simulated"
    return Claim(name, setup, "farsight-mean", base, "jct_s", 1.10, to_simulation=True)


CLAIMS: tuple[Claim, ...] = (
    Claim("fastserve / fcfs, 8 tasks at 1.1", "i256 1.1", "fastserve", "fcfs", "jct_s", 0.5),
    Claim("fastserve / fcfs, 8 tasks at 0.9", "i256 0.9", "fastserve", "fcfs", "jct_s", 0.9),
    Claim("fastserve / reactive, tight KV", "zipf15 0.9", "fastserve", "fastserve-reactive", "jct_s", 1.0),
    Claim("reactive / defer, tight KV", "zipf15 0.9", "fastserve-reactive", "fastserve-defer", "jct_s", 1.0),
    *(
        Claim(f"past-future / {base}, {mix}: goodput", mix, "past-future", base, "goodput", 1.0, at_most=False)
        for mix in ("D1/8 1.0", "D3/8 1.0")
        for base in ("aggressive", "conservative")
    ),
    *(
        Claim(f"past-future, {mix}: evictions a request", mix, "past-future", "", "evictions", 0.05)
        for mix in ("D1/8 1.0", "D3/8 1.0")
    ),
    Claim("magnus / magnus-vs, static: throughput", "i64 0.5", "magnus", "magnus-vs", "throughput", 1.6, at_most=False),
    Claim("magnus / magnus-vs, static: response", "i64 0.5", "magnus", "magnus-vs", "jct_s", 0.4),
    Claim(
        "multi-bin, 8 bins / 1 bin, static: throughput",
        "bins",
        "multi-bin, 8 bins",
        "multi-bin, 1 bin",
        "throughput",
        1.45,
        at_most=False,
    ),
    _like_simulation("i256 1.1, short", "past-future"),
    _like_simulation("i256 1.1, short", "fastserve"),
    _like_simulation("zipf 1.1", "past-future"),
    _like_simulation("zipf 1.1", "fastserve"),
)
"""An overload of few requests has no time to build a queue: what is compared with FCFS runs longer than the rest."""
