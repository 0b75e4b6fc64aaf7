"""One Past-Future decision: 256 running jobs, 1000 in the queue, a history of 1000 outputs."""

from __future__ import annotations

import numpy as np

from benchmarks.decisions.row import Row, median_s
from farsight.policies.admission.past_future import HistoryLengths, PastFuture, future_memory
from farsight.policies.interfaces import Job
from farsight.policies.lengths.history import LengthHistory

RUNNING = 256
QUEUED = 1000


def rows() -> list[Row]:
    rng = np.random.default_rng(0)
    prompts, outputs = rng.integers(32, 1024, RUNNING + QUEUED).tolist(), rng.integers(1, 1024, 1000).tolist()
    running = [Job(f"r{i}", 0.0, prompts[i], 2048, output_len=outputs[i] // 2) for i in range(RUNNING)]
    queue = [Job(f"q{i}", 0.0, prompts[RUNNING + i], 2048) for i in range(QUEUED)]
    admission = PastFuture(HistoryLengths(LengthHistory(initial=outputs), rng))
    base, left = np.array([each.known_len for each in running]), rng.integers(1, 512, RUNNING)
    room = int(future_memory(base, left) * 1.1)

    def walk() -> None:
        admission.begin(running, room)
        for each in queue:
            if not admission.admits(each):
                break
            admission.add(each)

    def ask_all() -> None:
        admission.begin(running, room)
        admission.fits(queue)

    what = f"Past-Future, {RUNNING} running, {QUEUED} queued"
    return [
        Row(f"{what}: begin and walk until it stops", 1e3 * median_s(walk), 1, "ms"),
        Row(f"{what}: begin and ask for all of them", 1e3 * median_s(ask_all), 1, "ms"),
    ]
