"""Which preset, and how many replicas, a traffic needs: every option runs the same windows of the traffic.

Pure: the caller says which windows have been run, and decides by its own clock when to stop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from farsight.core.config.scheduling import DEFAULT_PRESET
from farsight.core.errors import InvalidValueError
from farsight.policies.presets import PRESETS
from farsight.simulator.compare import Interval, interval, paired_ratio
from farsight.simulator.experiment import Experiment
from farsight.simulator.run import run
from farsight.simulator.summary import show
from farsight.simulator.traffic.workload import SimRequest, Workload
from farsight.simulator.traffic.workloads import retime

if TYPE_CHECKING:
    from rich.table import Table

METRICS = ("goodput_share", "jct_s_mean", "jct_s_p99", "ttft_s_p99", "output_tokens_per_s")
MIN_WINDOW = 20
"""Requests below which a window says nothing."""


@dataclass(frozen=True, slots=True, order=True)
class Setup:
    """A preset on a number of replicas."""

    num_replicas: int
    preset: str


@dataclass(frozen=True, slots=True)
class Measured:
    """One setup over the windows.

    Args:
        windows: By window the metrics of ``METRICS``; None where a run has no such number.
    """

    setup: Setup
    windows: tuple[Mapping[str, float | None], ...]

    def interval(self, metric: str) -> Interval | None:
        """The metric's mean over windows; None if a window lacks it."""
        values = [window[metric] for window in self.windows]
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        return _within(interval(known), most=1.0 if metric == "goodput_share" else math.inf)

    def keeps(self, target: float) -> bool:
        """Whether the share of good requests reaches the target in the mean over windows."""
        return fmean(window["goodput_share"] or 0.0 for window in self.windows) >= target

    def mean(self, metric: str) -> float:
        """The mean over windows; infinite if a window lacks the metric."""
        known = self.interval(metric)
        return math.inf if known is None else known.mean


@dataclass(frozen=True, slots=True)
class Advice:
    """What to run, and why.

    Attributes:
        best: The recommended setup.
        rivals: Choices with as many replicas whose mean JCT the windows do not tell apart from the best one's.
        holds: Whether the best setup keeps the target.
        reason: One sentence.
        doubts: What the advice is uncertain of, one sentence each.
    """

    best: Measured
    rivals: tuple[Measured, ...]
    holds: bool
    reason: str
    doubts: tuple[str, ...]


def _within(found: Interval, most: float) -> Interval:
    """The same interval, cut to what the metric can be: 0 to ``most``."""
    if found.low is None or found.high is None:
        return found
    return Interval(found.mean, max(0.0, found.low), min(most, found.high))


def setups(presets: Sequence[str], max_replicas: int) -> list[Setup]:
    """All presets on 1 to ``max_replicas`` replicas."""
    return [Setup(replicas, preset) for replicas in range(1, max_replicas + 1) for preset in presets]


def cut_windows(arrivals: Workload, size: int, count: int) -> list[list[SimRequest]]:
    """Windows of consecutive requests, spread evenly over the traffic, each moved to instant 0.

    Args:
        size: Requests of a window.
        count: Most windows; fewer if the traffic is shorter, and one of all requests if it is shorter than a window.

    Raises:
        InvalidValueError: There are too few requests.
    """
    if len(arrivals) < MIN_WINDOW:
        raise InvalidValueError("TRACE", f"{len(arrivals)} requests", f"at least {MIN_WINDOW} requests")
    size = min(size, len(arrivals))
    count = min(count, len(arrivals) // size)
    step = (len(arrivals) - size) / max(1, count - 1)
    firsts = [round(index * step) for index in range(count)]
    return [_moved(arrivals[first : first + size]) for first in firsts]


def _moved(window: Workload) -> list[SimRequest]:
    begin = window[0].arrived_at
    return retime(window, [arrival.arrived_at - begin for arrival in window])


def run_setup(experiment: Experiment, setup: Setup, window: Workload) -> dict[str, float | None]:
    """The metrics of one setup on one window."""
    chosen = replace(experiment.under(setup.preset), num_replicas=setup.num_replicas)
    summary = run(chosen, window).summary.to_dict()
    return {name: summary[name] for name in METRICS}


def in_order(options: Sequence[Setup], num_windows: int) -> Iterator[tuple[int, Setup]]:
    """Runs in the order in which they tell most: a window is complete before the next one begins."""
    for index in range(num_windows):
        for setup in options:
            yield index, setup


def complete(
    results: Mapping[tuple[int, Setup], dict[str, float | None]], options: Sequence[Setup], num_windows: int
) -> list[Measured]:
    """What has been measured, over those windows that every setup has run."""
    done = [index for index in range(num_windows) if all((index, setup) in results for setup in options)]
    return [Measured(setup, tuple(results[index, setup] for index in done)) for setup in options if done]


def advise(measured: Sequence[Measured], target: float) -> Advice:
    """The fewest replicas on which a streaming preset keeps the target; among those presets, the least mean JCT.

    A mean JCT that the windows do not tell apart from the least counts as the least, for the default preset alone.

    Args:
        measured: Each setup over the same windows, at least one.
        target: Share of requests that should keep the SLA, 0 to 1.

    Raises:
        InvalidValueError: No preset streams.
    """
    streaming = [each for each in measured if PRESETS[each.setup.preset].mode == "continuous"]
    if not streaming:
        raise InvalidValueError("presets", [each.setup.preset for each in measured], "one that streams, as fcfs")
    keeping = [each for each in streaming if each.keeps(target)]
    if keeping:
        fewest = min(each.setup.num_replicas for each in keeping)
        able = [each for each in keeping if each.setup.num_replicas == fewest]
        quickest = min(able, key=lambda each: (each.mean("jct_s_mean"), each.setup))
        alike = [each for each in able if each is quickest or not _told_apart(each, quickest)]
        # The default is advised unless another one is measurably quicker.
        best = next((each for each in alike if each.setup.preset == DEFAULT_PRESET), quickest)
    else:
        fewest = max(each.setup.num_replicas for each in streaming)
        able = [each for each in streaming if each.setup.num_replicas == fewest]
        best = max(able, key=lambda each: (each.mean("goodput_share"), -each.mean("jct_s_mean")))
    rivals = tuple(each for each in able if each is not best and not _told_apart(each, best))
    reason = _reason(best, able, fewest, target, holds=bool(keeping))
    return Advice(best, rivals, bool(keeping), reason, tuple(_doubts(best, rivals, target, holds=bool(keeping))))


def _told_apart(each: Measured, best: Measured) -> bool:
    """Whether the 95 % interval of the ratio of mean JCTs over paired windows lies above 1."""
    pairs = [
        (ours["jct_s_mean"], theirs["jct_s_mean"]) for ours, theirs in zip(each.windows, best.windows, strict=True)
    ]
    ratio = paired_ratio(pairs)
    return ratio is not None and ratio.low is not None and ratio.low > 1


def _reason(best: Measured, able: Sequence[Measured], fewest: int, target: float, *, holds: bool) -> str:
    count = "1 replica" if fewest == 1 else f"{fewest} replicas"
    share = f"{100 * best.mean('goodput_share'):.1f} %"
    if not holds:
        return (
            f"No preset keeps the targets for {100 * target:g} % of the requests, even on {count}; "
            f"{best.setup.preset} comes nearest with {share}."
        )
    others = [each for each in able if each is not best]
    second = min(others, key=lambda each: each.mean("jct_s_mean"), default=None)
    beside = "" if second is None else f", that of {second.setup.preset} {show(second.mean('jct_s_mean'))} s"
    fewer = "" if fewest == 1 else f", and on fewer no preset keeps them for {100 * target:g} %"
    return (
        f"On {count} {best.setup.preset} keeps the targets for {share} of the requests{fewer}; "
        f"its mean JCT is {show(best.mean('jct_s_mean'))} s{beside}."
    )


def _doubts(best: Measured, rivals: Sequence[Measured], target: float, *, holds: bool) -> Iterator[str]:
    share = best.interval("goodput_share")
    if share is None or share.low is None:
        yield "One window was run, so there are no intervals: a longer trace or more time would give some."
    elif holds and share.low < target:
        yield (
            f"Over windows the share of good requests varies: the lower end of its interval is {100 * share.low:.1f} %."
        )
    if rivals:
        names = ", ".join(each.setup.preset for each in rivals)
        yield f"The windows do not tell its mean JCT apart from that of {names}."


def table(measured: Sequence[Measured], best: Measured) -> Table:
    """A row for each preset: by number of replicas the share of good requests and the mean JCT."""
    from rich.table import Table

    counts = sorted({each.setup.num_replicas for each in measured})
    shown = Table("")
    for count in counts:
        name = "1 replica" if count == 1 else f"{count} replicas"
        shown.add_column(f"{name}: good %", justify="right")
        shown.add_column("JCT s, mean", justify="right")
        shown.add_column("p99", justify="right")
    by_choice = {each.setup: each for each in measured}
    for preset in dict.fromkeys(each.setup.preset for each in measured):
        cells = [cell for count in counts for cell in _cells(by_choice[Setup(count, preset)])]
        shown.add_row(preset, *cells, style="bold" if preset == best.setup.preset else None)
    return shown


def _cells(each: Measured) -> tuple[str, str, str]:
    share, mean = each.interval("goodput_share"), each.interval("jct_s_mean")
    p99 = each.interval("jct_s_p99")
    return _cell(share, 100), _cell(mean, 1), "-" if p99 is None else show(p99.mean)


def _cell(found: Interval | None, scale: float) -> str:
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return show(scale * found.mean)
    return f"{show(scale * found.mean)} ({show(scale * found.low)} to {show(scale * found.high)})"


def to_dict(measured: Sequence[Measured], advice: Advice) -> dict[str, Any]:
    """For programs; the keys are a contract."""
    return {
        "options": [
            {"preset": each.setup.preset, "replicas": each.setup.num_replicas}
            | {name: None if (found := each.interval(name)) is None else asdict(found) for name in METRICS}
            for each in measured
        ],
        "recommended": {"preset": advice.best.setup.preset, "replicas": advice.best.setup.num_replicas},
        "holds": advice.holds,
        "not_told_apart": [each.setup.preset for each in advice.rivals],
        "reason": advice.reason,
        "uncertain": list(advice.doubts),
        "windows": len(advice.best.windows),
    }
