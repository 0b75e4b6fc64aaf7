"""Figure 6 of FastServe, run: which job has the server when, under skip-join MLFQ and under plain MLFQ."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from core.config.scheduling import SchedulerConfig
from core.costs import StepCost
from lab.reproduce.paper_settings import FIXED_QUANTUM
from policies.interfaces import Job
from policies.order.skip_join_mlfq import SkipJoinMlfq

COST = StepCost(base_s=0, prefill_token_s=1, decode_seq_s=1, context_token_s=0)
COLORS = {"J1": "#4477aa", "J2": "#ee6677", "J3": "#228833"}
FIRST_S = {"J1": 5, "J2": 1, "J3": 2}


def draw() -> Figure:
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
