"""What the Gittins order, and the boosted one over it, cost a scheduling point."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from benchmarks.decisions.row import Row, median_s
from farsight.core.costs import StepCost
from farsight.core.forecast import Forecast
from farsight.policies.interfaces import Job
from farsight.policies.order.boosted import Boosted
from farsight.policies.order.gittins import DecodePrice, Gittins

NUM_RUNNING, NUM_QUEUED, NUM_DEEP = 256, 1000, 10_000


def rows() -> list[Row]:
    """Times all ranks again for a full replica, the order without a change, and a completion."""
    rng = np.random.default_rng(0)
    step = StepCost(0.01, 0.00011, 0.00002, 2e-7)
    price = DecodePrice(step, NUM_RUNNING, 121_000)
    order = Gittins(price)
    jobs = []
    for index in range(NUM_RUNNING + NUM_QUEUED):
        quantiles = tuple(np.sort(rng.lognormal(5.0, 1.0, 6)).tolist())
        job = Job(str(index), float(index), 200, 4096, forecast=Forecast(150.0, quantiles, 1, "test", 0))
        if index < NUM_RUNNING:
            job.output_len, job.computed_len = 40, 239
        jobs.append(job)
        order.add(job, 0.0)
    done = Job("done", 0.0, 200, 4096, forecast=jobs[0].forecast, output_len=120)
    for _ in range(300):
        order.learn(done, censored=False)
    order.refresh(0.0)
    sixteenth = jobs[: NUM_RUNNING // 16]

    def all_anew() -> None:
        order.price(step, 121_000)
        order.refresh(0.0)

    def some_anew() -> None:
        for job in sixteenth:
            job.output_len = 40 if job.output_len > 40 else 56
            job.computed_len = job.known_len - 1
            order.remove(job)
            order.add(job, 0.0)
        order.refresh(0.0)

    return [
        Row("gittins: rank 256 running and 1000 queued again", median_s(all_anew) * 1e3, 2.0, "ms"),
        Row("gittins: rank the 16 running that are due in a step", median_s(some_anew) * 1e3, 0.5, "ms"),
        Row("gittins: best of 1256", median_s(lambda: next(order.ranked(0.0))) * 1e3, 0.5, "ms"),
        Row("gittins: one completion", median_s(lambda: order.learn(done, censored=False)) * 1e3, 2.0, "ms"),
        Row(f"boosted: first {NUM_RUNNING} of {NUM_DEEP:,}", median_s(_deep_queue(price)) * 1e3, 2.0, "ms"),
    ]


def _deep_queue(price: DecodePrice) -> Callable[[], object]:
    """Ranks a deep queue, at a new instant each time."""
    order = Boosted(price)
    for index in range(NUM_DEEP):
        order.add(Job(str(index), float(index), 20 + index % 500, 1024), 0.0)
    next(order.ranked(0.0))
    instants = itertools.count(NUM_DEEP)
    return lambda: list(itertools.islice(order.ranked(float(next(instants))), NUM_RUNNING))
