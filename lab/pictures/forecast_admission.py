"""A small batch in its scenarios, and a large one as mean and spread."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from policies.admission.forecast import ForecastAdmission
from policies.interfaces import Job
from policies.lengths.history import FloatArray

NUM_PATHS = 14
RISK = 0.05


def draw() -> Figure:
    figure = Figure(figsize=(8.5, 3.0), layout="constrained")
    for axes, num_jobs in zip(figure.subplots(1, 2), (8, 60), strict=True):
        _plot(axes, num_jobs)
    return figure


def _plot(axes: Axes, num_jobs: int) -> None:
    """Short answers of narrow laws and long ones of wide laws, three to one."""
    rng = np.random.default_rng(num_jobs)
    jobs = [Job(str(i), 0.0, int(rng.integers(20, 200)), 2000) for i in range(num_jobs)]
    laws: dict[str, FloatArray] = {
        job.request_id: np.ceil(rng.gamma(2, 150, 64) if i % 4 == 0 else rng.normal(120, 15, 64).clip(1))
        for i, job in enumerate(jobs)
    }
    admission = ForecastAdmission(lambda job: laws[job.request_id], rng, eviction_risk=RISK)
    admission.begin(jobs, 10**6)
    ahead = np.arange(1, 502)
    paths = _paths(jobs, laws, ahead, rng)
    for path in paths:
        axes.plot(ahead[::12], path[::12], color="#bbbbbb", linewidth=0.5)
    axes.plot([], [], color="#bbbbbb", linewidth=0.5, label=f"{NUM_PATHS} ways it may go")
    axes.plot(ahead[::12], paths.mean(axis=0)[::12], color="#4477aa", label="their mean")
    peak = admission.predicted_peak
    axes.axhline(peak, color="#ee6677", linestyle="--", label=f"asked for at a risk of {RISK:.0%}")
    method = "32 scenarios" if num_jobs < 30 else "mean and spread"
    axes.set_title(f"{num_jobs} jobs, by {method}: {peak:,} tokens", loc="left", fontsize=9)
    axes.set_xlabel("steps ahead")
    axes.set_ylabel("KV tokens of the batch")
    axes.set_xlim(0, 500)
    axes.set_ylim(0, peak * 1.25)
    axes.legend(frameon=False, loc="center right", fontsize=8)


def _paths(
    jobs: list[Job], laws: dict[str, FloatArray], ahead: NDArray[np.int64], rng: np.random.Generator
) -> FloatArray:
    """Memory at each step ahead, with lengths drawn afresh from the same laws; shape (paths, steps)."""
    held = np.zeros((NUM_PATHS, len(ahead)))
    for job in jobs:
        ends = rng.choice(laws[job.request_id], NUM_PATHS)
        held += (job.known_len + ahead) * (ahead <= ends[:, None])
    return held
