"""One scheduling point of skip-join MLFQ with 10,000 jobs queued: promotions, then the best 256."""

from __future__ import annotations

import itertools

import numpy as np

from benchmarks.decisions.row import Row, median_s
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import StepCost
from farsight.policies.interfaces import Job
from farsight.policies.order.skip_join_mlfq import SkipJoinMlfq

NUM_JOBS = 10_000
BATCH = 256
COST = StepCost(base_s=0.008, prefill_token_s=1e-4, decode_seq_s=1e-5, context_token_s=1e-7)


def filled(num_jobs: int, config: SchedulerConfig | None = None) -> tuple[SkipJoinMlfq, list[Job]]:
    """An order full of jobs with prompts of 1 to 4,096 tokens."""
    lens = np.random.default_rng(1).integers(1, 4096, num_jobs)
    jobs = [Job(f"j{i}", 0.0, int(prompt_len), 10**6) for i, prompt_len in enumerate(lens)]
    order = SkipJoinMlfq(COST, config)
    for job in jobs:
        order.add(job, 0.0)
    return order, jobs


def rows() -> list[Row]:
    order, _ = filled(NUM_JOBS)

    def decide() -> list[Job]:
        order.refresh(0.001)
        return list(itertools.islice(order.ranked(0.001), BATCH))

    def decide_and_report() -> None:
        for job in decide():
            job.output_len += 1
            job.computed_len = job.known_len - 1
            order.ran(job, 0.012, 0.001)

    decision = Row("skip-join MLFQ: promotions and best 256 of 10,000", median_s(decide) * 1e3, 1.0, "ms")
    report = Row("skip-join MLFQ: the same, and 256 jobs ran", median_s(decide_and_report) * 1e3, 10.0, "ms")
    return [decision, report, _promotions()]


def _promotions() -> Row:
    """All jobs below level 1 starve at once."""
    orders = [filled(NUM_JOBS)[0] for _ in range(4)]
    num_below = NUM_JOBS - orders[0].num_in_top(1)
    seconds = median_s(lambda: orders.pop().refresh(10.0), 3) / num_below
    return Row("skip-join MLFQ: one promotion of 10,000", seconds * 1e6, 50.0, "us")
