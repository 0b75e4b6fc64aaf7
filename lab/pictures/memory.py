"""Pictures of memory: admission by Past-Future, and whom ENST moves to the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import StepCost
from farsight.policies.admission.conservative import Conservative
from farsight.policies.admission.past_future import HistoryLengths, PastFuture, future_memory
from farsight.policies.admission.watermark import Aggressive
from farsight.policies.interfaces import Admission, Job, KvView
from farsight.policies.kv.enst_offload import EnstOffload, enst_s
from farsight.policies.lengths.history import LengthHistory
from farsight.policies.order.skip_join_mlfq import SkipJoinMlfq
from lab.reproduce.rows import FIXED_QUANTUM

CAPACITY = 3000
LIMIT = 300
NUM_REQUESTS = 90


@dataclass
class Course:
    """Tokens at each step, and the steps at which a job was evicted."""

    held: list[int] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)


def draw_past_future() -> Figure:
    """Draws the memory of one replica over time under three admissions: what is held, and what the batch will need."""
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


LEVELS = (1, 1, 2, 3, 3, 4, 4, 5, 5)
SINCE = (0, 0, 0, 0, 0, 0, -16, 0, -22)
LIMIT_S = 30.0
FREE, NUM_RUNNING = 90, 2


def draw_enst_offload() -> Figure:
    """Draws residents of a replica by ENST, and which of them leave so that the idle target is free."""
    order = SkipJoinMlfq(StepCost(0, 1, 1, 0), SchedulerConfig(quantum_s=1.0, starve_limit_s=LIMIT_S), FIXED_QUANTUM)
    jobs: list[Job] = []
    for i, (level, since) in sorted(enumerate(zip(LEVELS, SINCE, strict=True)), key=lambda each: each[1][1]):
        job = Job(f"J{i + 1}", float(since), prompt_len=2 ** (level - 1), max_new_tokens=500)
        order.add(job, float(since))
        jobs.append(job)
    for job in jobs:
        job.output_len = 100 - job.prompt_len
        job.computed_len = job.known_len
    jobs.sort(key=lambda job: job.request_id)
    running, idle = jobs[:NUM_RUNNING], jobs[NUM_RUNNING:]
    policy = EnstOffload(order, min_idle_slots=1, num_burst_levels=2)
    view = KvView(running, idle, (), free=FREE, needed=NUM_RUNNING, host_free=10_000, host_capacity=10_000)
    leaving = {job.request_id for job in policy.moves(view, 0.0).offload}
    times = enst_s(order, idle, 0.0)
    figure = Figure(figsize=(7.5, 3.6))
    axes = figure.subplots()
    ranked = sorted(idle, key=lambda job: times[job.request_id])
    for row, job in enumerate(ranked):
        name, waited_s = job.request_id, order.waited_s(job, 0.0)
        color = "#ee6677" if name in leaving else "#4477aa"
        axes.barh(row, times[name], color=color, height=0.65)
        limit = "its promotion" if times[name] == LIMIT_S - waited_s else "quanta of higher levels"
        axes.text(times[name] + 0.4, row, f"{times[name]:.0f} s: {limit}", va="center", fontsize=8)
    axes.set_yticks(
        range(len(ranked)),
        [f"{job.request_id}, level {order.level(job)}, waited {order.waited_s(job, 0.0):.0f} s" for job in ranked],
    )
    axes.set_xlabel("estimated next scheduled time (ENST) in s")
    axes.set_xlim(0, 42)
    axes.invert_yaxis()
    target = policy.idle_target(view)
    axes.set_title(
        f"{NUM_RUNNING} jobs run, 7 idle jobs of 100 tokens; {FREE} tokens free,"
        f" target {target} ({order.num_in_top(2)} jobs in the top 2 levels)",
        loc="left",
        fontsize=9,
    )
    handles = [Patch(color="#4477aa", label="stays on the device"), Patch(color="#ee6677", label="is offloaded")]
    axes.legend(handles=handles, loc="upper right", frameon=False)
    return figure
