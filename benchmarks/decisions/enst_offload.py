"""One scheduling point of proactive offload with 10,000 jobs in the order, 1,000 of them idle with KV."""

from __future__ import annotations

from benchmarks.decisions.row import Row, median_s
from benchmarks.decisions.skip_join_mlfq import filled
from farsight.policies.interfaces import KvView
from farsight.policies.kv.enst_offload import EnstOffload, enst_s

NUM_JOBS = 10_000
NUM_IDLE = 1_000


def rows() -> list[Row]:
    order, jobs = filled(NUM_JOBS)
    for job in jobs[: NUM_IDLE + 256]:
        job.computed_len = job.known_len
    idle, running = jobs[:NUM_IDLE], jobs[NUM_IDLE : NUM_IDLE + 256]
    view = KvView(running, idle, (), free=0, needed=256, host_free=10**7, host_capacity=10**7)
    policy = EnstOffload(order)
    return [
        Row("ENST of 10,000 jobs", median_s(lambda: enst_s(order, jobs, 1.0)) * 1e3, 20.0, "ms"),
        Row("proactive offload, 1,000 idle of 10,000", median_s(lambda: policy.moves(view, 1.0)) * 1e3, 5.0, "ms"),
    ]
