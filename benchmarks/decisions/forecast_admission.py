"""One decision by the jobs' own forecasts: 256 running jobs, 1000 in the queue, laws of 64 points that lie ready."""

from __future__ import annotations

import numpy as np

from benchmarks.decisions.row import Row, median_s
from policies.admission.forecast import ForecastAdmission
from policies.interfaces import Job

RUNNING = 256
QUEUED = 1000


def rows() -> list[Row]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(32, 1024, RUNNING + QUEUED).tolist()
    running = [Job(f"r{i}", 0.0, prompts[i], 2048, output_len=i) for i in range(RUNNING)]
    queue = [Job(f"q{i}", 0.0, prompts[RUNNING + i], 2048) for i in range(QUEUED)]
    laws = {job.request_id: job.output_len + rng.gamma(2, 200, 64) for job in (*running, *queue)}
    admission = ForecastAdmission(lambda job: laws[job.request_id], rng)
    admission.begin(running, 0)
    room = int(admission.predicted_peak * 1.05)

    def walk() -> None:
        admission.begin(running, room)
        refused = 0
        for each in queue:
            if admission.admits(each):
                admission.add(each)
            else:
                refused += 1
                if refused > admission.max_skips:
                    break

    claim = f"Admission by forecast, {RUNNING} running, {QUEUED} queued: begin and walk until it stops"
    return [Row(claim, 1e3 * median_s(walk), 5, "ms")]
