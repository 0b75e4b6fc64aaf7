"""A mix of two kinds of requests, told apart by the limits that their clients set."""

from __future__ import annotations

import numpy as np

from simulator.traffic.arrivals import ArrivalProcess
from simulator.traffic.lengths import LengthPair, Uniform
from simulator.traffic.workload import SimRequest

CHAT = LengthPair(Uniform(20, 200), Uniform(10, 64), 64)
REPORT = LengthPair(Uniform(200, 600), Uniform(200, 640), 640)
REPORT_SHARE = 0.25


def chat_and_reports(rng: np.random.Generator, num_requests: int, process: ArrivalProcess) -> list[SimRequest]:
    """Chat messages and, one in four, reports of ten times the length; each kind with its own ``max_new_tokens``.

    The laws are assumed, not fitted to a data set. O(num_requests).
    """
    instants = process.sample(rng, num_requests)
    are_reports = rng.random(num_requests) < REPORT_SHARE
    drawn = {
        pair: (pair.prompt.sample(rng, num_requests), pair.output.sample(rng, num_requests)) for pair in (CHAT, REPORT)
    }
    requests = []
    for i, (at, is_report) in enumerate(zip(instants, are_reports, strict=True)):
        pair = REPORT if is_report else CHAT
        prompts, outputs = drawn[pair]
        kind = "report" if is_report else "chat"
        requests.append(
            SimRequest(f"{kind}-{i}", float(at), int(prompts[i]), int(outputs[i]), pair.max_new_tokens, app=kind)
        )
    return requests
