"""Residents of a replica by ENST, and which of them leave so that the idle target is free."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from core.config.scheduling import SchedulerConfig
from core.costs import StepCost
from lab.reproduce.paper_settings import FIXED_QUANTUM
from policies.interfaces import Job, KvView
from policies.kv.enst_offload import EnstOffload, enst_s
from policies.order.skip_join_mlfq import SkipJoinMlfq

LEVELS = (1, 1, 2, 3, 3, 4, 4, 5, 5)
SINCE = (0, 0, 0, 0, 0, 0, -16, 0, -22)
LIMIT_S = 30.0
FREE, NUM_RUNNING = 90, 2


def draw() -> Figure:
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
