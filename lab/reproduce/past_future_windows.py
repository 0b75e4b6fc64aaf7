"""Figures 3 and 4 of Past-Future: how alike the output lengths of neighbouring windows of requests are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lab.reproduce.rows import EXACT, ONE_DRAW, Exempt, OrderCheck, Row
from simulator.traffic.traces import MissingTraceError, find_data, read_trace

NAN = math.nan

CHANCE = 0.01
"""By less than this, windows of one distribution differ in similarity."""


def similarity(some: Sequence[int], others: Sequence[int], width: int = 16) -> float:
    """Cosine of two histograms of lengths, in bins of so many tokens; 1 for the same distribution."""
    num_bins = max(*some, *others) // width + 1
    a, b = (np.bincount(np.asarray(each) // width, minlength=num_bins).astype(float) for each in (some, others))
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def adjacent_similarity(lengths: Sequence[int], history: int, running: int, first: int) -> float:
    """Mean similarity of windows of ``running`` requests, from ``first`` on, with the ``history`` just before each."""
    starts = range(first, len(lengths) - running + 1, running)
    return float(np.mean([similarity(lengths[i : i + running], lengths[i - history : i]) for i in starts]))


def distant_similarity(lengths: Sequence[int], size: int) -> float:
    """Mean similarity of windows of this size that are neither equal nor neighbours."""
    windows = [lengths[i : i + size] for i in range(0, len(lengths) - size + 1, size)]
    pairs = [(a, b) for i, a in enumerate(windows) for b in windows[i + 2 :]]
    return float(np.mean([similarity(a, b) for a, b in pairs]))


TRACES = ("azure2023_conv.csv.gz", "azure2023_code.csv.gz", "mooncake_conversation.jsonl.gz")


def figure_3() -> list[Row]:
    """Windows of 1,000 requests: those next to each other are alike, and at least as much as others are."""
    name, rows = "past_future_window", []
    for file in TRACES:
        setting = f"Fig. 3, {file.split('.')[0]}"
        try:
            lengths = [arrival.output_len for arrival in read_trace(find_data(file))]
        except MissingTraceError as problem:
            rows.append(Row(name, setting, "similarity of adjacent windows", Exempt(str(problem)), NAN))
            continue
        adjacent, apart = adjacent_similarity(lengths, 1000, 1000, 1000), distant_similarity(lengths, 1000)
        note = "the paper's figure has no numbers; high is taken as 0.9; bins of 16 tokens"
        rows.append(
            Row(name, setting, "similarity of adjacent windows", OrderCheck(adjacent > 0.9), adjacent, note, EXACT)
        )
        order = OrderCheck(adjacent > apart)
        draws = EXACT if abs(adjacent - apart) > CHANCE else ONE_DRAW
        rows.append(Row(name, setting, "adjacent less apart", order, adjacent - apart, note, draws))
    return rows


def figure_4() -> list[Row]:
    """A history of 1,000 does about as well as any other, whatever the size of the batch."""
    name, metric = "past_future_window", "similarity of a history of 1000, of the best"
    missing = Exempt("not at hand; get it from https://github.com/HPMLL/BurstGPT")
    rows = [Row(name, "Fig. 4, BurstGPT", metric, missing, NAN)]
    try:
        lengths = [arrival.output_len for arrival in read_trace(find_data(TRACES[0]))]
    except MissingTraceError as problem:
        return [*rows, Row(name, "Fig. 4, azure2023_conv", metric, Exempt(str(problem)), NAN)]
    note = "histories of 100, 200, 500, 1000, 2000 and 4000; at least 0.97 of the best"
    sizes = (100, 200, 500, 1000, 2000, 4000)
    for running in (50, 200, 1000):
        similarities = {size: adjacent_similarity(lengths, size, running, max(sizes)) for size in sizes}
        ours = similarities[1000] / max(similarities.values())
        rows.append(
            Row(name, f"Fig. 4, azure2023_conv, {running} running", metric, OrderCheck(ours >= 0.97), ours, note, EXACT)
        )
    return rows
