"""Plots of a run and of an advice; matplotlib, an optional dependency, is imported only when a plot is drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from farsight.core.errors import FarsightError
from farsight.simulator.advice import Advice, Measured
from farsight.simulator.cluster.records import Record, Timeline
from farsight.simulator.compare import Interval

SIZE_INCHES = (9.0, 4.5)
MAX_LINES = 8
"""Most replicas, or apps, drawn one by one."""

_STATES = (("running", "#2a7f9e"), ("offloaded", "#8c6bb1"), ("waiting", "#d9a441"))


def check_matplotlib() -> None:
    """Checks for matplotlib before a run that will be drawn.

    Raises:
        FarsightError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise FarsightError("--plot needs matplotlib, which is not installed: pip install 'farsight[bench]'")


def write_plots(
    directory: Path, title: str, records: Sequence[Record], timeline: Timeline | None, capacity: int
) -> list[Path]:
    """Writes ``jct.png`` and, from samples, ``memory.png``, ``queues.png`` and ``load.png``; returns their paths.

    Args:
        title: Description of the run.
        timeline: None or empty without samples.
        capacity: KV tokens of one replica.
    """
    from matplotlib.figure import Figure

    drawings: dict[str, Callable[[Any], None]] = {"jct": lambda axes: draw_jct(axes, records)}
    if timeline is not None and timeline.num_samples:
        drawings["memory"] = lambda axes: draw_memory(axes, timeline, capacity)
        drawings["queues"] = lambda axes: draw_queues(axes, timeline)
        drawings["load"] = lambda axes: draw_load(axes, timeline)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in drawings.items():
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_title(f"{axes.get_title()}\n{title}", fontsize="medium")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        paths.append(directory / f"{name}.png")
        figure.savefig(paths[-1], dpi=110, metadata={"Software": None})
    return paths


def draw_jct(axes: Any, records: Sequence[Record]) -> None:
    """The distribution of JCT over all requests, and for each app if there are several."""
    by_app: dict[str, list[float]] = {}
    for record in records:
        by_app.setdefault(record.arrival.app or "other", []).append(record.jct_s)
    groups = {"all": [record.jct_s for record in records]}
    if 1 < len(by_app) <= MAX_LINES:
        groups |= dict(sorted(by_app.items()))
    for name, values in groups.items():
        ordered = np.sort(values)
        shares = 100 * np.arange(1, len(ordered) + 1) / len(ordered)
        style = {"color": "black", "linewidth": 2} if name == "all" else {"linewidth": 1.2}
        axes.step(ordered, shares, where="post", label=f"{name} ({len(ordered):,})", **style)
    axes.set(
        title="Job completion time", xlabel="JCT in s (logarithmic)", ylabel="% of requests at most", ylim=(0, 101)
    )
    axes.set_xscale("log")
    axes.legend(loc="upper left", frameon=False)


def draw_memory(axes: Any, timeline: Timeline, capacity: int) -> None:
    """KV in use, for several replicas their range, and the mean peak that admission predicts, if it does."""
    _draw_replicas(axes, timeline, 100 * timeline.series("used_tokens") / capacity, "in use", max_lines=1)
    predicted = timeline.series("predicted_tokens")
    if predicted.size and not np.isnan(predicted).all():
        axes.plot(
            timeline.times_s(),
            100 * predicted.mean(axis=1) / capacity,
            color="#c0392b",
            linewidth=1,
            linestyle="--",
            label="predicted peak of the admitted" + (", mean" if predicted.shape[1] > 1 else ""),
        )
    axes.axhline(100, color="black", linewidth=1)
    axes.set(title="KV memory", xlabel="virtual time in s", ylabel="% of the pool", ylim=(0, None), xlim=(0, None))
    _legend(axes)


def draw_queues(axes: Any, timeline: Timeline) -> None:
    """Requests of all replicas by state, stacked."""
    levels = [timeline.series(name).sum(axis=1) for name, _ in _STATES]
    used = [i for i, level in enumerate(levels) if level.any()]
    axes.stackplot(
        timeline.times_s(),
        [levels[i] for i in used],
        labels=[_STATES[i][0] for i in used],
        colors=[_STATES[i][1] for i in used],
        linewidth=0,
    )
    axes.set(title="Requests by state", xlabel="virtual time in s", ylabel="requests", ylim=(0, None), xlim=(0, None))
    _legend(axes)


def draw_load(axes: Any, timeline: Timeline) -> None:
    """Requests of each replica, or their range."""
    load = sum((timeline.series(name) for name, _ in _STATES), start=np.zeros(()))
    _draw_replicas(axes, timeline, load, "requests", MAX_LINES)
    axes.set(
        title="Load of each replica", xlabel="virtual time in s", ylabel="requests", ylim=(0, None), xlim=(0, None)
    )
    _legend(axes)


def _draw_replicas(axes: Any, timeline: Timeline, values: Any, what: str, max_lines: int) -> None:
    times_s, num_replicas = timeline.times_s(), values.shape[1]
    if num_replicas <= max_lines:
        for i in range(num_replicas):
            label = what if num_replicas == 1 else f"replica {i}"
            axes.plot(times_s, values[:, i], linewidth=1.2, label=label)
        return
    low, middle, high = np.quantile(values, (0.1, 0.5, 0.9), axis=1)
    axes.fill_between(
        times_s, values.min(axis=1), values.max(axis=1), alpha=0.15, color="C0", linewidth=0, label="all replicas"
    )
    axes.fill_between(times_s, low, high, alpha=0.35, color="C0", linewidth=0, label="10 % to 90 %")
    axes.plot(times_s, middle, color="C0", label=f"median of {num_replicas} replicas")


def _legend(axes: Any) -> None:
    """Puts the legend beside the axes, so that it hides no line."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


_PANELS = (("goodput_share", "requests that keep the targets, %", 100.0), ("jct_s_mean", "mean JCT, s", 1.0))
_SIZE_INCHES = (11.0, 4.5)
_STEP = 0.025
"""Replicas by which the line of a preset is drawn to the right of the one before."""


def write_picture(path: Path, measured: Sequence[Measured], advice: Advice, target: float) -> None:
    """Writes a PNG or SVG file, by its ending; bars are 95 % intervals over windows."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    presets = list(dict.fromkeys(each.setup.preset for each in measured))
    best = advice.best.setup
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    all_axes = figure.subplots(1, len(_PANELS))
    for axes, (metric, label, scale) in zip(all_axes, _PANELS, strict=True):
        for index, preset in enumerate(presets):
            rows = [each for each in measured if each.setup.preset == preset]
            _draw(axes, index, rows, metric, scale, heavy=preset == best.preset)
        axes.set_xlabel("replicas")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].axhline(100 * target, color="black", linestyle=":", linewidth=1)
    all_axes[1].set_yscale("log")
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.suptitle(f"Advised: {best.preset}, replicas: {best.num_replicas}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw(axes: Any, index: int, rows: Sequence[Measured], metric: str, scale: float, *, heavy: bool) -> None:
    """One preset's line; a step to the side keeps the bars of presets apart."""
    found = [(each.setup.num_replicas, each.interval(metric)) for each in rows]
    points = [(count, interval) for count, interval in found if interval is not None]
    axes.errorbar(
        [count + _STEP * index for count, _ in points],
        [scale * interval.mean for _, interval in points],
        yerr=[[scale * width for width in side] for side in _widths([interval for _, interval in points])],
        label=rows[0].setup.preset,
        linewidth=2.5 if heavy else 1.0,
        alpha=1.0 if heavy else 0.6,
        marker="o",
        markersize=5 if heavy else 3,
        capsize=2,
    )


def _widths(found: Sequence[Interval]) -> tuple[list[float], list[float]]:
    """How far each interval reaches below and above its mean; 0 without one."""
    below = [0.0 if each.low is None else each.mean - each.low for each in found]
    return below, [0.0 if each.high is None else each.high - each.mean for each in found]
