"""Pictures of the papers' figures: what the paper prints, and what came out here."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lab.papers.tables import DOCS, NUMBER, StoredRow, digest, picture, rows_of
from lab.reproduce.papers import Paper, PaperFigure

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "farsight",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLOURS = {"ok": "#2e8b57", "fitted": "#3b6fb6", "off": "#c0392b", "open": "#d9a406", "exempt": "#888888"}
COLUMNS = 3
LEAST_POINTS = 3
"""Rows from which on settings that differ in a number are drawn along that number."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Rows along one number of their setting; ``what`` is the word before that number."""

    label: str
    what: str
    xs: tuple[float, ...]
    rows: tuple[StoredRow, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """Rows of one metric, as curves if they make some."""

    title: str
    curves: list[Curve]
    rows: list[StoredRow]

    @property
    def height(self) -> float:
        """In inches."""
        return 2.6 if self.curves else max(1.2, 0.24 * len(self.rows) + 0.6)


def draw(paper: Paper, figure: PaperFigure, folder: Path = DOCS, suffix: str = ".svg") -> None:
    """Writes the figure's picture under the folder, as SVG or PNG."""
    by_metric: dict[str, list[StoredRow]] = defaultdict(list)
    for row in rows_of(figure):
        if row.ours is not None or row.reported is not None:
            by_metric[row.metric].append(row)
    with matplotlib.rc_context(STYLE):
        drawing = _draw(by_metric)
        drawing.suptitle(f"{paper.name}, {figure.number}: {figure.what}", fontsize="large")
        metadata = {"Date": None, "Creator": "lab.papers", "Description": digest(figure)} if suffix == ".svg" else {}
        drawing.savefig((folder / picture(paper, figure)).with_suffix(suffix), metadata=metadata, dpi=70)


def _draw(by_metric: dict[str, list[StoredRow]]) -> Figure:
    panels = _panels(by_metric)
    columns = min(COLUMNS, len(panels))
    lines = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [max(panel.height for panel in line) for line in lines]
    drawing = Figure(figsize=(4.0 * columns if columns > 1 else 6.5, sum(heights) + 0.9), layout="constrained")
    axes = drawing.subplots(len(lines), columns, squeeze=False, height_ratios=heights)
    for place, cell in enumerate(axes.flat):
        if place >= len(panels):
            cell.set_axis_off()
            continue
        panel = panels[place]
        _draw_curves(cell, panel.curves) if panel.curves else _draw_points(cell, panel.rows)
        cell.set_title(panel.title, fontsize="medium")
        cell.grid(alpha=0.25)
    drawing.legend(handles=_legend(), loc="outside lower center", ncols=6 if columns > 1 else 3, frameon=False)
    return drawing


def _panels(by_metric: dict[str, list[StoredRow]]) -> list[Panel]:
    """One for each metric; if each has a single row, one for all, where the metric names the row."""
    if len(by_metric) > 1 and all(len(rows) == 1 for rows in by_metric.values()):
        rows = [replace(row, setting=row.metric) for (row,) in by_metric.values()]
        return [Panel("", [], rows)]
    return [Panel(metric, _curves(rows), rows) for metric, rows in by_metric.items()]


def _curves(rows: list[StoredRow]) -> list[Curve]:
    """Curves along the number in which the settings differ most; none if some row would be alone."""
    alike: dict[str, list[StoredRow]] = defaultdict(list)
    for row in rows:
        alike[NUMBER.sub("#", row.setting)].append(row)
    found: list[Curve] = []
    for group in alike.values():
        along = _along(group, rows)
        if along is None:
            return []
        found += _curves_along(group, along)
    return [] if any(len(curve.rows) < 2 for curve in found) else found


def _along(group: list[StoredRow], rows: list[StoredRow]) -> int | None:
    """The place of the number that differs most among all rows with as many numbers."""
    count = len(NUMBER.findall(group[0].setting))
    numbers = [found for row in rows if len(found := NUMBER.findall(row.setting)) == count]
    distinct = [len(set(values)) for values in zip(*numbers, strict=True)]
    if not distinct or max(distinct) < LEAST_POINTS:
        return None
    return distinct.index(max(distinct))


def _curves_along(rows: list[StoredRow], place: int) -> list[Curve]:
    groups: dict[tuple[str, str], list[StoredRow]] = defaultdict(list)
    for row in rows:
        found = list(NUMBER.finditer(row.setting))[place]
        before, after = row.setting[: found.start()].rstrip(" ="), row.setting[found.end() :].split(",")[0].strip()
        what = after if before.endswith(",") or not before else before.split(" ")[-1]
        groups[row.setting[: found.start()] + "..." + row.setting[found.end() :], what].append(row)
    return [
        Curve(label, what, tuple(float(NUMBER.findall(row.setting)[place]) for row in group), tuple(group))
        for (label, what), group in groups.items()
    ]


def _draw_curves(axes: Any, curves: list[Curve]) -> None:
    for number, curve in enumerate(curves):
        colour = f"C{number % 10}"
        values = [math.nan if row.ours is None else row.ours for row in curve.rows]
        axes.plot(curve.xs, values, color=colour, linewidth=1, label=curve.label, zorder=1)
        for x, row in zip(curve.xs, curve.rows, strict=True):
            _mark(axes, row, lambda value, x=x: (x, value), vertical=True)
    _scale(axes.set_yscale, [row for curve in curves for row in curve.rows])
    spread = [x for curve in curves for x in curve.xs]
    if min(spread) > 0 and max(spread) / min(spread) >= 16:
        axes.set_xscale("log")
    axes.set_xlabel(" or ".join(dict.fromkeys(curve.what for curve in curves)))
    if len(curves) > 1:
        axes.legend(fontsize="x-small", frameon=False)


def _draw_points(axes: Any, rows: Sequence[StoredRow]) -> None:
    for place, row in enumerate(rows):
        _mark(axes, row, lambda value, place=place: (value, place), vertical=False)
    axes.set_yticks(range(len(rows)), [_short(row.setting) for row in rows], fontsize="x-small")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    _scale(axes.set_xscale, rows)
    shown = [value for row in rows for value in (row.ours, *_ends(row.reported)) if value is not None]
    if axes.get_xscale() == "linear" and shown and min(shown) > 0:
        axes.set_xlim(0, 1.06 * max(shown))


def _ends(figure: float | list[float | None] | None) -> list[float | None]:
    return figure if isinstance(figure, list) else [figure]


def _short(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 34, max_lines=2, placeholder="..."))


def _scale(set_scale: Any, rows: Sequence[StoredRow]) -> None:
    values = [row.ours for row in rows if row.ours is not None]
    if values and min(values) > 0 and max(values) / min(values) > 30:
        set_scale("log")


def _mark(axes: Any, row: StoredRow, at: Any, *, vertical: bool) -> None:
    """Ours as a dot in the colour of its verdict; what it is held against as a diamond, or as a bar for a range."""
    figure = row.reported if row.reported is not None else row.expected
    colour = "black" if row.reported is not None else "#999999"
    if isinstance(figure, list):
        low, high = figure
        ours = row.ours if row.ours is not None else (low or high or 0.0)
        ends = [low if low is not None else min(ours, high or ours), high if high is not None else max(ours, low or 0)]
        (xs, ys) = zip(*(at(each) for each in ends), strict=True)
        axes.plot(xs, ys, color=colour, linewidth=4, alpha=0.3, solid_capstyle="butt", zorder=2)
    elif figure is not None:
        axes.plot(*at(figure), marker="D", markersize=6, markerfacecolor="none", markeredgecolor=colour, zorder=2)
    if row.ours is not None:
        axes.plot(*at(row.ours), marker="o", markersize=3.5, color=COLOURS[row.verdict], zorder=3, linestyle="none")


def _legend() -> list[Line2D]:
    def dot(label: str, colour: str, marker: str = "o", *, hollow: bool = False) -> Line2D:
        face = "none" if hollow else colour
        return Line2D([], [], marker=marker, linestyle="none", color=colour, markerfacecolor=face, label=label)

    dots = [dot(f"ours, {verdict}", colour) for verdict, colour in COLOURS.items()]
    return [*dots, dot("printed", "black", "D", hollow=True), dot("formula or target", "#999999", "D", hollow=True)]
