"""Pictures of batches: bins of similar lengths, and the padding of batches by WMA."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from farsight.policies.batching.base import BatchPolicy, FormedBatch, first_arrived
from farsight.policies.batching.fcfs import FcfsBatches
from farsight.policies.batching.multi_bin import MultiBinBatcher, uniform_edges
from farsight.policies.batching.wma import WmaBatcher, wasted_memory_accesses
from farsight.policies.interfaces import Job
from lab.reproduce.multi_bin_runs import UniformService

SYSTEM = UniformService(1, 20, 128)
RATE = 8


def draw_multi_bin() -> Figure:
    """Draws requests that fall into bins and leave in batches of four, and what more bins give and cost in theory."""
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


BIG, SMALL = 300, 60
COLOURS = {"padding": "0.82", "prompt": "tab:blue", "output": "tab:green", "waits for the longest": "tab:red"}


def draw_wma_batcher() -> Figure:
    """Draws the same 21 requests in FCFS batches of seven and in WMA batches: every row of every batch, padded."""
    figure, axes = plt.subplots(1, 2, figsize=(8.2, 3.9), sharey=True, layout="constrained")
    _batch_rows(axes[0], "FCFS, batches of 7", _formed_batches(FcfsBatches(7)))
    _batch_rows(axes[1], "WMA", _formed_batches(WmaBatcher(20_000, first_arrived)))
    axes[0].set_ylabel("rows of the batches, as they are served")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _formed_batches(batcher: BatchPolicy) -> list[FormedBatch]:
    for index in range(21):
        length = SMALL if index % 7 else BIG
        batcher.add(Job(str(index), float(index), length, length), float(index))
    batches = []
    while (batch := batcher.pull(21.0)) is not None:
        batches.append(batch)
    return batches


def _batch_rows(axes: Axes, title: str, batches: list[FormedBatch]) -> None:
    row = 0.0
    for batch in batches:
        first = row
        for prompt_len, output_len in zip(batch.prompt_lens, batch.predicted_lens, strict=True):
            parts = (batch.prompt_len - prompt_len, prompt_len, output_len, batch.predicted_len - output_len)
            left = 0
            for width, (label, colour) in zip(parts, COLOURS.items(), strict=True):
                known = label in axes.get_legend_handles_labels()[1]
                axes.barh(row, width, 0.85, left, color=colour, label=None if known else label)
                left += width
            row += 1
        note = f"WMA {wasted_memory_accesses(batch):,}"
        axes.text(left + 12, (first + row - 1) / 2, note, va="center", fontsize=8)
        row += 1
    iterations = sum(batch.predicted_len for batch in batches)
    axes.set(title=f"{title}: {len(batches)} batches, {iterations} iterations", xlabel="tokens of a row")
    axes.set_xlim(0, 2 * BIG + 190)
    axes.set_xticks(range(0, 2 * BIG + 1, 150))
    axes.set_yticks([])
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
