"""Pictures of orders: whose turn it is, by boost, Gittins rank, prefix hits, response ratio and levels of FastServe."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import StepCost
from farsight.core.forecast import Forecast
from farsight.policies.batching.base import BatchQueue, ChooseBatch, first_arrived
from farsight.policies.batching.hrrn import HighestResponseRatio, response_ratio
from farsight.policies.interfaces import Job
from farsight.policies.order.boosted import Boosted, boosts
from farsight.policies.order.gittins import DecodePrice, Gittins
from farsight.policies.order.hit_groups import HitGroups, quotas
from farsight.policies.order.skip_join_mlfq import SkipJoinMlfq
from lab.reproduce.rows import FIXED_QUANTUM

NUM_WAITING = (3, 30, 300)
"""Requests of 500 output tokens that wait."""


def draw_boosted() -> Figure:
    """Draws the boost of a request over the length of its output, under three backlogs."""
    figure = Figure(figsize=(7.5, 4.0), layout="constrained")
    axes = figure.subplots()
    lengths = np.geomspace(5, 4000, 60)
    for num in NUM_WAITING:
        order = Boosted(DecodePrice(StepCost(0.01, 0.00011, 0.00002, 2e-7), 64, 121_000))
        jobs = [_job(f"asked{index}", length) for index, length in enumerate(lengths)]
        waiting = [_job(f"waits{index}", 500.0) for index in range(num)]
        for job in waiting:
            order.add(job, 0.0)
        order.refresh(0.0)
        yardstick_s = order.yardstick_s
        for job in jobs:
            order.add(job, 0.0)
        boost_s = boosts(order.rank(jobs), yardstick_s, 1200.0)
        axes.plot(lengths, boost_s, label=f"{num} (yardstick {yardstick_s:.1f} s)")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.01)
    axes.set_xlabel("output tokens, as predicted")
    axes.set_ylabel("boost (s)")
    axes.legend(title="requests of 500 tokens that wait")
    return figure


def _job(name: str, length: float) -> Job:
    forecast = Forecast(length, (length,) * 6, 1, "example", 0)
    return Job(name, 0.0, 200, 4096, forecast=forecast)


LAWS = {
    "certain: 400 tokens": (400.0,) * 6,
    "quartiles 50, 55, 790, linear between": (45.0, 50.0, 55.0, 790.0, 800.0, 810.0),
    "heavy tail: median 60": (10.0, 25.0, 60.0, 180.0, 450.0, 2000.0),
}


def draw_gittins() -> Figure:
    """Draws the Gittins rank of a job as it generates, for three laws of its output length; smaller ranks go first."""
    figure = Figure(figsize=(7.5, 4.0), layout="constrained")
    axes = figure.subplots()
    price = DecodePrice(StepCost(0.01, 0.00011, 0.00002, 2e-7), 64, 121_000)
    generated = np.arange(1, 600, 4)
    for label, quantiles in LAWS.items():
        forecast = Forecast(float(np.mean(quantiles)), quantiles, 1, "example", 0)
        order, jobs = Gittins(price), []
        for n in generated.tolist():
            jobs.append(Job(str(n), 0.0, 200, 4096, forecast=forecast, output_len=n, computed_len=199 + n))
            order.add(jobs[-1], 0.0)
        axes.plot(generated, order.rank(jobs) * 1e3, label=label)
    axes.set_xlabel("tokens generated so far")
    axes.set_ylabel("rank (ms of the replica), smaller first")
    axes.set_ylim(bottom=0)
    axes.legend(title="law of the output length")
    return figure


SLOTS = 55
WAITING = (20, 3, 9, 2, 8, 12, 4, 15, 6, 30)


def draw_hit_groups() -> Figure:
    """Draws the queue before, and the batch that is taken from it: who gets the slots, by prefix hits."""
    order = HitGroups(SLOTS)
    for group, num in enumerate(WAITING):
        for i in range(num):
            order.add(Job(f"{group}-{i}", float(i), 100, 10, cached_len=10 * group + 5), 0.0)
    taken = Counter(order.group(job) for job in islice(order.ranked(0.0), SLOTS))
    groups = np.arange(len(WAITING))
    figure = Figure(figsize=(6.8, 3.3))
    axes = figure.subplots()
    axes.bar(groups, WAITING, color="#dddddd", width=0.75, label="waiting")
    axes.bar(groups, [taken[int(group)] for group in groups], color="#4c78a8", width=0.75, label="in the batch")
    shares = quotas(len(WAITING), SLOTS)
    axes.hlines(shares, groups - 0.42, groups + 0.42, color="#e45756", label="the group's share")
    axes.set_xticks(groups, [f"{10 * g}-{10 * g + 10}" for g in groups], fontsize=8)
    axes.set(xlabel="prompt tokens cached, %", ylabel="jobs", title="")
    axes.set_title(f"{SLOTS} free slots: 10 for the highest group, 9 for the next, ... 1", loc="left", fontsize=9)
    axes.legend(frameon=False, loc="upper center")
    figure.tight_layout()
    return figure


BATCHES = {"a": (0, 12), "b": (1, 20), "c": (4, 3), "d": (14, 2), "e": (16, 3), "f": (29, 3)}
"""Arrival and serving time, s."""


def draw_hrrn() -> Figure:
    """Draws six batches on one worker: how their response ratios grow, and who runs when, beside FCFS."""
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


COST = StepCost(base_s=0, prefill_token_s=1, decode_seq_s=1, context_token_s=0)
COLORS = {"J1": "#4477aa", "J2": "#ee6677", "J3": "#228833"}
FIRST_S = {"J1": 5, "J2": 1, "J3": 2}


def draw_skip_join_mlfq() -> Figure:
    """Draws Figure 6 of FastServe, run: which job has the server when, under skip-join MLFQ and under plain MLFQ."""
    figure = Figure(figsize=(7.5, 4.6))
    top, bottom = figure.subplots(2, 1, sharex=True)
    for axes, skip_join, name in ((top, True, "skip-join MLFQ"), (bottom, False, "MLFQ: all join at level 1")):
        runs, mean_s = _run(skip_join)
        for job, level, begin, end, output_len in runs:
            color = COLORS[job]
            hatch = "//" if output_len == 1 else None
            axes.barh(level, end - begin, left=begin, height=0.7, color=color, edgecolor="white", hatch=hatch)
            axes.text(
                (begin + end) / 2, level - 0.42, f"{job} token {output_len}", ha="center", va="bottom", fontsize=6.5
            )
        axes.set_title(f"{name}: mean completion {mean_s:.2f} s", loc="left", fontsize=9)
        axes.set_ylabel("level (quantum)")
        axes.set_yticks([1, 2, 3, 4], ["1 (1 s)", "2 (2 s)", "3 (4 s)", "4 (8 s)"])
        axes.set_ylim(4.6, 0.3)
        axes.set_xlim(0, 11.2)
        axes.set_xticks(range(12))
    bottom.set_xlabel("time in s")
    handles = [Patch(color=color, label=f"{job}: prefill {FIRST_S[job]} s, 2 tokens") for job, color in COLORS.items()]
    handles.append(Patch(facecolor="#bbbbbb", edgecolor="white", hatch="//", label="prefill"))
    figure.legend(handles=handles, ncol=4, loc="lower center", frameon=False, fontsize=8)
    figure.subplots_adjust(bottom=0.18, hspace=0.35)
    return figure


def _run(skip_join: bool) -> tuple[list[tuple[str, int, float, float, int]], float]:
    """(job, level, begin, end, number of the token) of every iteration, and the mean completion time."""
    config = SchedulerConfig(quantum_s=1.0, starve_limit_s=100.0, mlfq="skip-join" if skip_join else "no-preemption")
    order = SkipJoinMlfq(COST, config, FIXED_QUANTUM)
    for name, first_s in FIRST_S.items():
        order.add(Job(name, 0.0, prompt_len=first_s, max_new_tokens=2), 0.0)
    runs: list[tuple[str, int, float, float, int]] = []
    now, completions = 0.0, []
    while (job := next(order.ranked(now), None)) is not None:
        begin, level = now, order.level(job)
        now += order.next_iteration_s(job)
        job.computed_len, job.output_len = job.known_len, job.output_len + 1
        runs.append((job.request_id, level, begin, now, job.output_len))
        if job.output_len == job.max_new_tokens:
            order.remove(job)
            completions.append(now)
        else:
            order.ran(job, now - begin, now)
    return runs, sum(completions) / len(completions)
