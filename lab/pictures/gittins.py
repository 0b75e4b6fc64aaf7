"""The Gittins rank of a job as it generates, for three laws of its output length."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from core.costs import StepCost
from core.forecast import Forecast
from policies.interfaces import Job
from policies.order.gittins import DecodePrice, Gittins

LAWS = {
    "certain: 400 tokens": (400.0,) * 6,
    "quartiles 50, 55, 790, linear between": (45.0, 50.0, 55.0, 790.0, 800.0, 810.0),
    "heavy tail: median 60": (10.0, 25.0, 60.0, 180.0, 450.0, 2000.0),
}


def draw() -> Figure:
    """Rank over tokens generated so far; a smaller rank goes first."""
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
