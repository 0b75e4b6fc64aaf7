"""Magnus: one arrival and one choice with 1,000 batches queued."""

from __future__ import annotations

import math
from itertools import count

import numpy as np

from benchmarks.decisions.row import Row, median_s
from farsight.core.costs import StepCost
from farsight.policies.batching.hrrn import HighestResponseRatio, HrrnOrder
from farsight.policies.batching.wma import WmaBatcher
from farsight.policies.interfaces import Job

NUM_BATCHES = 1000
BATCH_SIZE = 20
LAST_PROMPT_LEN = 500


def rows() -> list[Row]:
    """Arrivals with 1,000 open batches of 20, each followed by its abort; pulls; the order of continuous batching."""
    batcher = full_batcher()
    names = count()

    last = LAST_PROMPT_LEN, 999 + NUM_BATCHES

    def arrive(prompt_len: int, output_len: int) -> None:
        name = f"new{next(names)}"
        batcher.add(Job(name, 0.0, prompt_len, output_len), 0.0)
        batcher.remove(name)

    choice = HighestResponseRatio(lambda size, prompt_len, output_len: 0.01 * output_len + 1e-6 * size * prompt_len)
    pulled = full_batcher(choice)
    order = HrrnOrder(lambda cost, job: cost.base_s * (job.max_new_tokens - job.output_len), StepCost(0.01, 0, 0, 0))
    for index in range(1000):
        order.add(Job(f"r{index}", -float(index), 100, 1 + index % 97), 0.0)
    return [
        Row("WMA: arrival and abort, joins the last of 1,000", 1e3 * median_s(lambda: arrive(*last), 300), 1.0, "ms"),
        Row("WMA: arrival and abort, joins none of 1,000", 1e3 * median_s(lambda: arrive(9, 9), 300), 1.0, "ms"),
        Row("HRRN: one of 1,000 batches is pulled", 1e3 * median_s(lambda: pulled.pull(1e4), 50), 2.0, "ms"),
        Row("HRRN: the best of 1,000 waiting jobs", 1e3 * median_s(lambda: next(order.ranked(1.0)), 50), 2.0, "ms"),
    ]


def full_batcher(choice: HighestResponseRatio | None = None) -> WmaBatcher:
    """1,000 open batches of 20, each of prompts and outputs of one length, so that none wastes anything."""
    rng = np.random.default_rng(1)
    choose = choice or HighestResponseRatio(lambda size, prompt_len, output_len: 1.0)
    batcher = WmaBatcher(math.inf, choose, wma_threshold=1, max_batch_size=BATCH_SIZE + 1)
    for index in range(NUM_BATCHES):
        prompt_len = LAST_PROMPT_LEN if index == NUM_BATCHES - 1 else int(rng.integers(10, 1000))
        output_len = 1000 + index
        for member in range(BATCH_SIZE):
            batcher.add(Job(f"{index}.{member}", float(index), prompt_len, output_len), float(index))
    return batcher
