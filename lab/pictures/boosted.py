"""The boost of a request over the length of its output, under three backlogs."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from core.costs import StepCost
from core.forecast import Forecast
from policies.interfaces import Job
from policies.order.boosted import Boosted, boosts
from policies.order.gittins import DecodePrice

NUM_WAITING = (3, 30, 300)
"""Requests of 500 output tokens that wait."""


def draw() -> Figure:
    """Seconds by which a request counts as older, by the law of ``Boosted`` with tail 1."""
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
