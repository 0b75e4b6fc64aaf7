"""The same 21 requests in FCFS batches of seven and in WMA batches: every row of every batch, padded."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from policies.batching.base import BatchPolicy, FormedBatch, first_arrived
from policies.batching.fcfs import FcfsBatches
from policies.batching.wma import WmaBatcher, wasted_memory_accesses
from policies.interfaces import Job

BIG, SMALL = 300, 60
COLOURS = {"padding": "0.82", "prompt": "tab:blue", "output": "tab:green", "waits for the longest": "tab:red"}


def draw() -> Figure:
    figure, axes = plt.subplots(1, 2, figsize=(8.2, 3.9), sharey=True, layout="constrained")
    _rows(axes[0], "FCFS, batches of 7", _batches(FcfsBatches(7)))
    _rows(axes[1], "WMA", _batches(WmaBatcher(20_000, first_arrived)))
    axes[0].set_ylabel("rows of the batches, as they are served")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _batches(batcher: BatchPolicy) -> list[FormedBatch]:
    for index in range(21):
        length = SMALL if index % 7 else BIG
        batcher.add(Job(str(index), float(index), length, length), float(index))
    batches = []
    while (batch := batcher.pull(21.0)) is not None:
        batches.append(batch)
    return batches


def _rows(axes: Axes, title: str, batches: list[FormedBatch]) -> None:
    row = 0.0
    for batch in batches:
        first = row
        for prompt_len, output_len in zip(batch.prompt_lens, batch.predicted_lens, strict=True):
            parts = (
                batch.prompt_len - prompt_len,
                prompt_len,
                output_len,
                batch.predicted_len - output_len,
            )
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
