"""Plots of a measured load; matplotlib, an optional dependency, is imported only when a plot is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.bench.load import RunResult
from services.bench.statistics import latencies, token_rate

SIZE_INCHES = (13.0, 7.0)
NUM_BINS = 60

TITLES = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per output token",
    "mtpot_ms": "Longest pause of a request",
    "jct_ms": "Time of a request",
}


def plot_case(path: Path, title: str, runs: Mapping[str, Sequence[RunResult]]) -> None:
    """Writes a PNG: the distribution of every latency and the throughput over time, a line for each server.

    Latencies are pooled over all rounds; the throughput is the mean of the rounds.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.subplots(2, 3).flatten()
    figure.suptitle(title)
    for panel, (name, heading) in zip(axes, TITLES.items(), strict=False):
        _plot_distribution(panel, name, heading, runs)
    _plot_throughput(axes[len(TITLES)], runs)
    axes[-1].axis("off")
    handles, labels = axes[len(TITLES)].get_legend_handles_labels()
    axes[-1].legend(handles, labels, loc="center", fontsize="large")
    figure.savefig(path, dpi=110)


def _plot_distribution(panel: Any, name: str, heading: str, runs: Mapping[str, Sequence[RunResult]]) -> None:
    for label, of_target in runs.items():
        values = sorted(value for run in of_target for value in latencies(run.answers)[name])
        shares = [100 * (i + 1) / len(values) for i in range(len(values))]
        panel.step(values, shares, where="post", label=label)
    panel.set(title=heading, xlabel="ms", ylabel="% of requests at most", ylim=(0, 100), xlim=(0, None))
    panel.grid(alpha=0.3)


def _plot_throughput(panel: Any, runs: Mapping[str, Sequence[RunResult]]) -> None:
    for label, of_target in runs.items():
        panel.plot(*token_rate(of_target, NUM_BINS), label=label)
    panel.set(title="Throughput", xlabel="s from the beginning", ylabel="output tokens/s", ylim=(0, None))
    panel.set_xlim(0, None)
    panel.grid(alpha=0.3)
