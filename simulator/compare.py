"""Presets side by side: every preset runs the same workloads, one for each seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from scipy.special import stdtrit

from farsight.core.errors import InvalidValueError
from farsight.simulator.experiment import Experiment, make_arrivals
from farsight.simulator.run import run
from farsight.simulator.summary import Summary, show

if TYPE_CHECKING:
    from rich.table import Table

CONFIDENCE = 0.95

_SAME, _LIGHT_SLOWDOWN = 1e-3, 1.3
"""Ratios that differ from 1 by less are none. Requests that never wait share steps, which last longer than alone."""

SHOWN = {
    "JCT s, mean": "jct_s_mean",
    "JCT s, p99": "jct_s_p99",
    "TTFT s, mean": "ttft_s_mean",
    "TTFT s, p99": "ttft_s_p99",
    "TPOT s, mean": "tpot_s_mean",
    "MTPOT s, p99": "mtpot_s_p99",
    "slowdown, mean": "slowdown_mean",
    "slowdown, p99": "slowdown_p99",
    "good, share": "goodput_share",
    "good, requests/s": "goodput_requests_per_s",
    "output tokens/s": "output_tokens_per_s",
    "evictions per 100": "evictions_per_100_requests",
    "swaps per 100": "swaps_per_100_requests",
    "KV memory, mean share": "memory_mean_share",
    "steps": "num_steps",
}
"""A heading and the number that it shows."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % interval by Student's t; both ends are None for a single value."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Compared:
    """One preset and its ratios to the first.

    Attributes:
        runs: A summary for each seed.
    """

    preset: str
    base: str
    seeds: tuple[int, ...]
    runs: tuple[Summary, ...]
    ratios: Mapping[str, Interval | None]

    def mean(self, metric: str) -> float | None:
        """The mean over the seeds; None if a run does not have the number."""
        values = [run.to_dict()[metric] for run in self.runs]
        return None if any(value is None for value in values) else fmean(value for value in values if value is not None)

    def to_dict(self) -> dict[str, Any]:
        """One row: for each metric the values by seed, their mean, the ratio to the base. The keys are a contract."""
        return {
            "preset": self.preset,
            "base": self.base,
            "seeds": list(self.seeds),
            "metrics": {name: self._metric(name) for name in self.ratios},
        }

    def _metric(self, name: str) -> dict[str, Any]:
        ratio = self.ratios[name]
        return {
            "values": [run.to_dict()[name] for run in self.runs],
            "mean": self.mean(name),
            "ratio": None if ratio is None else ratio.mean,
            "ratio_low": None if ratio is None else ratio.low,
            "ratio_high": None if ratio is None else ratio.high,
        }


def compare(
    experiment: Experiment, presets: Sequence[str], seeds: Sequence[int], progress: Callable[[int], None] | None = None
) -> list[Compared]:
    """Runs each preset on the workload of each seed; ratios are relative to the first preset.

    Args:
        experiment: All settings except preset and seed.
        progress: Called from time to time with the number of ended requests of all runs.

    Raises:
        InvalidValueError: No preset or no seed, or one of them twice.
    """
    for name, values in (("presets", presets), ("seeds", seeds)):
        if not values or len(set(values)) != len(values):
            raise InvalidValueError(name, list(values), "at least one, each once")
    runs: dict[str, list[Summary]] = {preset: [] for preset in presets}
    num_ended = 0
    for seed in seeds:
        arrivals = make_arrivals(replace(experiment, seed=seed))
        for preset in presets:
            begun = num_ended
            tell = None if progress is None else _shifted(progress, begun)
            outcome = run(replace(experiment.under(preset), seed=seed), arrivals, progress=tell)
            runs[preset].append(outcome.summary)
            num_ended = begun + len(arrivals)
    base = presets[0]
    return [
        Compared(preset, base, tuple(seeds), tuple(runs[preset]), paired_ratios(runs[preset], runs[base]))
        for preset in presets
    ]


def idle_slowdown(compared: Sequence[Compared]) -> float | None:
    """The largest mean slowdown, where the load was so light that the presets had nothing to order: each preset's
    completion times are those of the first, and nearly those of requests that run alone. None where one waited.
    """
    others = compared[1:]
    slowdowns = [each.mean("slowdown_mean") for each in compared]
    ratios = [each.ratios[name] for each in others for name in ("jct_s_mean", "jct_s_p99")]
    same = all(ratio is not None and abs(ratio.mean - 1) < _SAME for ratio in ratios)
    known = [each for each in slowdowns if each is not None]
    if not others or not same or len(known) < len(slowdowns) or max(known) >= _LIGHT_SLOWDOWN:
        return None
    return max(known)


def _shifted(progress: Callable[[int], None], begun: int) -> Callable[[int], None]:
    return lambda num_ended: progress(begun + num_ended)


def paired_ratios(runs: Sequence[Summary], base_runs: Sequence[Summary]) -> dict[str, Interval | None]:
    """For each metric the ratio to the base; None unless all values on both sides are above 0."""
    pairs = [(run.to_dict(), base.to_dict()) for run, base in zip(runs, base_runs, strict=True)]
    return {name: paired_ratio([(ours[name], theirs[name]) for ours, theirs in pairs]) for name in pairs[0][0]}


def interval(values: Sequence[float]) -> Interval:
    """Returns the mean of at least one value and its interval."""
    mean = fmean(values)
    if len(values) == 1:
        return Interval(mean, None, None)
    student_t = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    margin = student_t * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - margin, mean + margin)


def paired_ratio(pairs: Sequence[tuple[float | None, float | None]]) -> Interval | None:
    """From (value, base value) by seed: the geometric mean of the ratios, and a paired t interval on their logarithms,
    which are closer to a normal law than the ratios and treat a half and a double alike."""
    logs = [math.log(ours / theirs) for ours, theirs in pairs if ours and theirs and ours > 0 and theirs > 0]
    if len(logs) < len(pairs):
        return None
    found = interval(logs)
    if found.low is None or found.high is None:
        return Interval(math.exp(found.mean), None, None)
    return Interval(math.exp(found.mean), math.exp(found.low), math.exp(found.high))


def comparison_table(compared: Sequence[Compared]) -> Table:
    """A table of means over seeds; each preset but the first also gets its ratio to the first, with interval."""
    from rich.table import Table

    base, *others = compared
    table = Table("", base.preset)
    for each in others:
        table.add_column(each.preset)
        table.add_column(f"{each.preset} / {base.preset}")
    for heading, name in SHOWN.items():
        cells = [cell for each in others for cell in (show(each.mean(name)), _show_ratio(each.ratios[name]))]
        table.add_row(heading, show(base.mean(name)), *cells)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _show_ratio(ratio: Interval | None) -> str:
    if ratio is None:
        return "-"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.mean:.3f}"
    return f"{ratio.mean:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
