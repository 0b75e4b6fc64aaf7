"""Requests fall into bins and leave in batches of four; and what more bins give and cost in theory."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.reproduce.multi_bin_theory import UniformService
from policies.batching.multi_bin import MultiBinBatcher, uniform_edges
from policies.interfaces import Job

SYSTEM = UniformService(1, 20, 128)
RATE = 8


def draw() -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.2, 3.6), width_ratios=(5, 4), layout="constrained")
    _batches(left)
    _theory(right)
    return figure


def _batches(axes: Axes) -> None:
    rng = np.random.default_rng(5)
    batcher = MultiBinBatcher(uniform_edges(0, 90, 3), batch_size=4)
    number = 0
    for second, length in enumerate(rng.integers(1, 91, 26)):
        batcher.add(Job(str(second), float(second), 10, int(length)), float(second))
        batch = batcher.pull(float(second))
        if batch is not None:
            colour = f"C{number % 10}"
            number += 1
            at = [job.arrived_at for job in batch.jobs]
            axes.plot(at, batch.predicted_lens, "o-", color=colour, lw=1, ms=5)
            axes.annotate(
                f"{number}", (at[-1], batch.predicted_lens[-1]), (6, 0), textcoords="offset points", color=colour
            )
    waiting: list[Job] = []
    batcher.flush(26.0)
    while (batch := batcher.pull(26.0)) is not None:
        waiting += batch.jobs
    axes.plot(
        [job.arrived_at for job in waiting], [job.max_new_tokens for job in waiting], "o", mfc="white", mec="0.4", ms=5
    )
    for edge in batcher.edges[1:-1]:
        axes.axhline(edge, color="0.6", lw=0.8, ls="--")
    axes.set(
        xlabel="arrival (s)",
        ylabel="predicted output length (tokens)",
        ylim=(0, 95),
        title="3 bins, batches of 4, numbered as completed\n(hollow: still waiting for company)",
    )


def _theory(axes: Axes) -> None:
    bins = range(1, 17)
    axes.plot(bins, [SYSTEM.throughput(each) for each in bins], "o-", ms=3, label="throughput c(k), left")
    axes.axhline(SYSTEM.max_throughput, color="C0", lw=0.8, ls="--")
    axes.text(9, SYSTEM.max_throughput + 0.15, "limit B/m", color="C0", fontsize=8)
    axes.set(
        xlabel="bins k",
        ylabel="throughput (requests/s)",
        ylim=(5, 14.5),
        xticks=(1, 4, 8, 12, 16),
        title=f"B = {SYSTEM.batch_size}, U({SYSTEM.low_s}, {SYSTEM.high_s}) s, {RATE} requests/s",
    )
    other = axes.twinx()
    other.plot(bins, [SYSTEM.latency_s(each, RATE) for each in bins], "s-", ms=3, color="C1", label="latency, right")
    other.set(ylabel="expected latency (s)", ylim=(0, 160))
    other.spines["right"].set_visible(True)
    handles = [*axes.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, loc="upper left", frameon=False, fontsize=8)
