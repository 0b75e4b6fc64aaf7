"""Memory of one replica over time under three admissions: what is held, and what the batch will need in the end."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from policies.admission.conservative import Conservative
from policies.admission.past_future import HistoryLengths, PastFuture, future_memory
from policies.admission.watermark import Aggressive
from policies.interfaces import Admission, Job
from policies.lengths.history import LengthHistory

CAPACITY = 3000
LIMIT = 300
NUM_REQUESTS = 90


@dataclass
class Course:
    """Tokens at each step, and the steps at which a job was evicted."""

    held: list[int] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)


def draw() -> Figure:
    rng = np.random.default_rng(3)
    prompts = rng.integers(5, 60, NUM_REQUESTS).tolist()
    outputs = rng.integers(100, LIMIT - 60, NUM_REQUESTS).tolist()
    history = LengthHistory(initial=rng.integers(100, LIMIT - 60, 200).tolist())
    admissions: list[tuple[str, Admission]] = [
        ("Aggressive, watermark 95 %", Aggressive(0.95)),
        ("Conservative", Conservative()),
        ("Past-Future, 5 % in reserve", PastFuture(HistoryLengths(history, np.random.default_rng(0)))),
    ]
    figure = Figure(figsize=(8.5, 3.0), layout="constrained")
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    for axes, (name, admission) in zip(panels, admissions, strict=True):
        _plot(axes, name, _run(admission, prompts, outputs))
    panels[0].set_ylabel("KV tokens")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _plot(axes: Axes, name: str, course: Course) -> None:
    steps = range(0, len(course.held), 3)
    axes.plot(steps, course.held[::3], color="#4477aa", label="held now")
    axes.plot(steps, course.needed[::3], color="#ccbb44", linewidth=1, label="peak of the batch if no job joins")
    axes.axhline(CAPACITY, color="black", linestyle="--", linewidth=1, label="capacity")
    axes.plot(
        course.evicted, [1.32 * CAPACITY] * len(course.evicted), "x", color="#ee6677", markersize=5, label="eviction"
    )
    num_evicted = len(course.evicted)
    axes.set_title(f"{name}\n{len(course.held)} steps, {num_evicted} evictions", loc="left", fontsize=9)
    axes.set_xlabel("decoding step")
    axes.set_ylim(0, CAPACITY * 1.4)


def _run(admission: Admission, prompts: list[int], outputs: list[int]) -> Course:
    """All are queued at the start; each step adds a token to every job, and the newest gives way if one is missing."""
    queue = [Job(str(i), 0.0, prompt, LIMIT) for i, prompt in enumerate(prompts)]
    running: list[Job] = []
    course = Course()
    while queue or running:
        admission.begin(running, CAPACITY)
        while queue and admission.admits(queue[0]):
            admission.add(queue[0])
            running.append(queue.pop(0))
        while sum(job.known_len + 1 for job in running) > CAPACITY:
            queue.insert(0, running.pop())
            course.evicted.append(len(course.held))
        left = np.array([outputs[int(job.request_id)] - job.output_len for job in running])
        course.needed.append(int(future_memory(np.array([job.known_len for job in running]), left)))
        for job in running:
            job.output_len += 1
        course.held.append(sum(job.known_len for job in running))
        for job in [job for job in running if job.output_len == outputs[int(job.request_id)]]:
            admission.learn(job.output_len, censored=False)
            running.remove(job)
    return course
