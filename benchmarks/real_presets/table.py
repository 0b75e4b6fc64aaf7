"""The table and the picture of all cells that have been measured into a folder."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farsight.services.bench.report import markdown_table
from farsight.simulator.compare import paired_ratio

Runs = Mapping[int, Mapping[str, float]]
"""Metrics by seed."""

Setting = tuple[str, float]
"""Workload and load."""

METRICS = {
    "mean": "jct_ms_mean",
    "median": "jct_ms_p50",
    "p99": "jct_ms_p99",
    "longest pause, p99": "mtpot_ms_p99",
    "tokens/s": "output_tokens_per_s",
}


def read(folder: Path) -> dict[Setting, dict[str, dict[int, dict[str, float]]]]:
    """Metrics by setting, system and seed."""
    found: dict[Setting, dict[str, dict[int, dict[str, float]]]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(folder.glob("*-*-*-*.json")):
        cell: dict[str, Any] = json.loads(path.read_text("utf-8"))
        found[cell["workload"], cell["load"]][cell["system"]][cell["seed"]] = cell["metrics"]
    return {setting: dict(sorted(systems.items())) for setting, systems in sorted(found.items())}


def table(folder: Path, bases: Sequence[str]) -> str:
    """A row for each setting and system: medians over seeds, seconds, and ratios to each base, over shared seeds."""
    rows = []
    for (workload, load), systems in read(folder).items():
        for name, runs in systems.items():
            row = [f"{workload} {load:g}", name, str(len(runs))]
            row += [_figure(metric, runs) for metric in METRICS.values()]
            row += [_ratios(runs, systems.get(base, {})) if base != name else "" for base in bases]
            rows.append(row)
    header = ["cell", "system", "seeds", *METRICS, *(f"mean, p99, pause / {base}" for base in bases)]
    return markdown_table(header, rows)


def _figure(metric: str, runs: Runs) -> str:
    value = statistics.median(each[metric] for each in runs.values())
    return f"{value:.0f}" if metric == METRICS["tokens/s"] else f"{value / 1000:.2f}"


def _ratios(runs: Runs, base: Runs) -> str:
    seeds = sorted(runs.keys() & base.keys())
    if not seeds:
        return ""
    return ", ".join(_ratio([(runs[seed][name], base[seed][name]) for seed in seeds]) for name in _COMPARED)


_COMPARED = ("jct_ms_mean", "jct_ms_p99", "mtpot_ms_p99")


def _ratio(pairs: Sequence[tuple[float, float]]) -> str:
    ratio = paired_ratio(pairs)
    if ratio is None:
        return "-"
    return f"{ratio.mean:.2f}" if ratio.low is None else f"{ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


CHAT_METRICS = {
    "mean end, unread": "unread_jct_ms_mean",
    "p99, unread": "unread_jct_ms_p99",
    "first token p50": "read_ttft_ms_p50",
    "its p99": "read_ttft_ms_p99",
    "reader waits, mean": "read_late_ms_mean",
    "reader waits, p99": "read_late_ms_p99",
    "end, mean": "jct_ms_mean",
    "end, p99": "jct_ms_p99",
    "tokens/s": "output_tokens_per_s",
}
"""What the clients of chats see: of those who wait for ends, of readers, and of all."""


def chat_table(folder: Path, base: str) -> str:
    """Returns a row for each setting and system of chats: medians over seeds, geometric means of ratios to ``base``.

    How long readers wait is compared by its sum over the seeds: many seeds have none.
    """
    rows = []
    for (workload, load), systems in read(folder).items():
        for name, runs in systems.items():
            if any(CHAT_METRICS["first token p50"] not in each for each in runs.values()):
                continue
            row = [f"{workload} {load:g}", name, str(len(runs))]
            row += [_beside(metric, runs, systems.get(base, {}), name == base) for metric in CHAT_METRICS.values()]
            rows.append(row)
    return markdown_table(["cell", "system", "seeds", *CHAT_METRICS], rows)


def preset_table(folder: Path, base: str) -> str:
    """Returns a row for each setting and system, best mean first: ratios to ``base``, and evictions of 100 requests.

    Ratios are geometric means over the seeds that both have.
    """
    rows = []
    for (workload, load), systems in read(folder).items():
        found = []
        for name, runs in systems.items():
            seeds = sorted(runs.keys() & systems.get(base, {}).keys())
            pairs = {key: [(runs[seed][key], systems[base][seed][key]) for seed in seeds] for key in _OF_PRESETS}
            mean = paired_ratio(pairs["jct_ms_mean"]) if seeds else None
            evicted = 100 * sum(each["evictions"] for each in runs.values())
            evictions = evicted / sum(each["requests"] for each in runs.values())
            cells = [_ratio(each) for each in pairs.values()]
            found.append((math.inf if mean is None else mean.mean, [name, *cells, f"{evictions:.0f}"]))
        rows += [[f"{workload} {load:g}", *cells] for _, cells in sorted(found)]
    return markdown_table(["cell", "system", *_OF_PRESETS.values(), "evictions / 100"], rows)


_OF_PRESETS = {"jct_ms_mean": "mean", "jct_ms_p99": "p99", "output_tokens_per_s": "tokens/s"}


def _beside(metric: str, runs: Runs, base: Runs, is_base: bool) -> str:
    seeds = sorted(runs.keys() & base.keys())
    if is_base or not seeds:
        return _figure(metric, runs)
    if metric.startswith("read_late"):
        mine, theirs = (sum(each[seed][metric] for seed in seeds) for each in (runs, base))
        return f"{_figure(metric, runs)}; {mine / theirs:.2f}" if theirs else _figure(metric, runs)
    return f"{_figure(metric, runs)}; {_ratio([(runs[seed][metric], base[seed][metric]) for seed in seeds])}"


def plot(folder: Path, path: Path) -> None:
    """Bars of mean, 99th percentile and longest pause (by its logarithm) for each setting; a colour for each system."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    settings = read(folder)
    systems = list(dict.fromkeys(name for each in settings.values() for name in each))
    figure = Figure(figsize=(11.0, 3.4), layout="constrained")
    for panel, (title, metric) in zip(figure.subplots(1, 3), _PANELS.items(), strict=True):
        for place, name in enumerate(systems):
            bars = [(at, _median_s(each[name], metric)) for at, each in enumerate(settings.values()) if name in each]
            shifted = [at + 0.8 * (place - (len(systems) - 1) / 2) / len(systems) for at, _ in bars]
            panel.bar(shifted, [value for _, value in bars], 0.8 / len(systems), label=name)
        panel.set_xticks(range(len(settings)), [f"{workload}\n{load:g}" for workload, load in settings])
        panel.set(title=title, ylabel="s")
    pauses = figure.axes[-1]
    pauses.set_yscale("log")
    pauses.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    pauses.yaxis.set_major_formatter("{x:g}")
    pauses.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(systems), frameon=False
    )
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


_PANELS = {"Mean time of a request": "jct_ms_mean", "Its 99th percentile": "jct_ms_p99"}
_PANELS |= {"Longest pause, 99th percentile": "mtpot_ms_p99"}


def _median_s(runs: Runs, metric: str) -> float:
    return statistics.median(each[metric] for each in runs.values()) / 1000
