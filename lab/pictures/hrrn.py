"""Six batches on one worker: how their response ratios grow, and who runs when, beside first come, first served."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from policies.batching.base import BatchQueue, ChooseBatch, first_arrived
from policies.batching.hrrn import HighestResponseRatio, response_ratio
from policies.interfaces import Job

BATCHES = {"a": (0, 12), "b": (1, 20), "c": (4, 3), "d": (14, 2), "e": (16, 3), "f": (29, 3)}
"""Arrival and serving time, s."""


def draw() -> Figure:
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(7.2, 4.6), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    hrrn = _serve(HighestResponseRatio(_serving_time_s))
    fcfs = _serve(first_arrived)
    for place, (name, (arrived_at, service_s)) in enumerate(BATCHES.items()):
        colour, begin = f"C{place}", hrrn[name]
        ratios = [response_ratio(at - arrived_at, service_s) for at in (arrived_at, begin)]
        upper.plot((arrived_at, begin), ratios, color=colour)
        upper.plot(begin, ratios[1], "o", color=colour)
        shift, side = ((-5, 3), "right") if begin else ((6, 4), "left")
        label = f"{name}: {service_s} s"
        upper.annotate(label, (begin, ratios[1]), shift, textcoords="offset points", color=colour, ha=side)
        for row, starts in enumerate((hrrn, fcfs)):
            _box(lower, row, name, starts[name], service_s, colour)
    upper.set(
        ylim=(0.5, 13),
        ylabel="response ratio R while waiting",
        title="A dot: the worker is idle and takes the highest ratio",
    )
    waits = [sum(starts[name] - BATCHES[name][0] for name in BATCHES) / len(BATCHES) for starts in (hrrn, fcfs)]
    lower.set_yticks((0, 1), (f"HRRN\nmean wait {waits[0]:.1f} s", f"FCFS\nmean wait {waits[1]:.1f} s"))
    lower.set(xlabel="time (s)", ylim=(1.6, -0.6))
    return figure


def _serving_time_s(batch_size: int, prompt_len: int, predicted_len: int) -> float:
    return float(predicted_len)


def _serve(choose: ChooseBatch) -> dict[str, float]:
    """When each batch begins."""
    queue, now, begins = BatchQueue(choose), 0.0, dict[str, float]()
    arrivals = list(BATCHES.items())
    while len(begins) < len(BATCHES):
        while arrivals and arrivals[0][1][0] <= now:
            name, (arrived_at, service_s) = arrivals.pop(0)
            batch = queue.new_batch(now)
            batch.insert(Job(name, arrived_at, 1, service_s))
            queue.put(batch)
        chosen = queue.pull(now)
        if chosen is None:
            now = arrivals[0][1][0]
            continue
        name = chosen.jobs[0].request_id
        begins[name] = now
        now += BATCHES[name][1]
    return begins


def _box(axes: Axes, row: int, name: str, begin: float, service_s: float, colour: str) -> None:
    axes.barh(row, service_s, 0.6, begin, color=colour, edgecolor="white")
    axes.text(begin + service_s / 2, row, name, ha="center", va="center", color="white")
