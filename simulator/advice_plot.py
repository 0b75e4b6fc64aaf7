"""The picture of an advice: good requests and mean JCT by the number of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulator.advice import Advice, Interval, Measured

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
