"""Whether promises of ends hold behind a change of load or of lengths: ``python -m benchmarks.promise_changes``.

Simulated: one replica of eight places under ``fcfs`` on an A100 with a 7B model, log-normal outputs, Poisson arrivals,
300 requests before the change and 200 behind it. A row gives, for the requests in order of arrival, the share that
ended within the p50 and the p90 that they were told, and the median of p90 / p50.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from farsight.policies.compose import build_router, build_scheduler
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.policies.settings import PolicySettings
from farsight.services.bench.report import markdown_table
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import A100_7B
from farsight.simulator.cluster.records import Record
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.traffic.lengths import LogNormal
from farsight.simulator.traffic.workload import SimRequest

PLACES, PROMPT_LEN, MAX_LEN, SIGMA = 8, 60, 1024, 0.6
BEFORE, BEHIND = 300, 200

State = tuple[float, int]
"""Load as a share of the capacity, and the median length of outputs."""

CHANGES: dict[str, tuple[State, State]] = {
    "none": ((0.8, 60), (0.8, 60)),
    "none, light": ((0.3, 60), (0.3, 60)),
    "load 0.15 to 2": ((0.15, 60), (2.0, 60)),
    "load 2 to 0.15": ((2.0, 60), (0.15, 60)),
    "outputs of 15 to 100": ((0.8, 15), (0.8, 100)),
    "outputs of 100 to 15": ((0.8, 100), (0.8, 15)),
}
PARTS = ((-150, 0), (0, 25), (25, 50), (50, 150))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=list(CHANGES))
    args = parser.parse_args()
    rows = []
    for change in args.changes:
        told = np.stack([promises(CHANGES[change], seed) for seed in range(args.seeds)])
        for first, last in PARTS:
            p50_s, p90_s, took_s = told[:, BEFORE + first : BEFORE + last].reshape(-1, 3).T
            shares = [f"{100 * float((took_s <= limit).mean()):.0f} %" for limit in (p50_s, p90_s)]
            rows.append([change, f"{first} to {last}", *shares, f"{float(np.median(p90_s / p50_s)):.2f}"])
    print(markdown_table(["change", "requests", "up to p50", "up to p90", "p90 / p50"], rows))


def promises(change: tuple[State, State], seed: int) -> NDArray[np.float64]:
    """What each request was told and took, shape (requests, 3): p50, p90 and the truth, in seconds."""
    rng, at, requests = np.random.default_rng(seed), 0.0, []
    rates = [load * _capacity(length) for load, length in change]
    for number in range(BEFORE + BEHIND):
        state = int(number >= BEFORE)
        at += rng.exponential(1 / rates[state])
        requests.append(_request(number, at, change[state][1], rng))
    found = {record.arrival.request_id: record for record in _run(requests)}
    rows = []
    for request in requests:
        promise = found[request.request_id].promise
        assert promise is not None
        rows.append((promise.p50_s, promise.p90_s, found[request.request_id].jct_s))
    return np.array(rows)


def _capacity(length: int) -> float:
    """Requests a second while all places are taken."""
    rng = np.random.default_rng(99)
    ends = sorted(record.finished_at for record in _run(_request(number, 0.0, length, rng) for number in range(200)))
    return 170 / ends[169]


def _request(number: int, at: float, length: int, rng: np.random.Generator) -> SimRequest:
    output_len = int(LogNormal(length, SIGMA, MAX_LEN).sample(rng, 1)[0])
    return SimRequest(f"r{number:04}", at, PROMPT_LEN, output_len, MAX_LEN)


def _run(requests: Iterable[SimRequest]) -> list[Record]:
    limits, settings = SchedulerLimits(PLACES, standby_slots=0), PolicySettings(cost=A100_7B.cost)
    shape = FleetShape(ReplicaShape(4000, max_num_seqs=PLACES, promises=True), A100_7B)
    return (
        Fleet(shape, build_router("fcfs"), lambda _: build_scheduler("fcfs", limits, settings)).run(list(requests)).done
    )


if __name__ == "__main__":
    main()
