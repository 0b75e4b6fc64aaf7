"""How fast the simulator is: ``python -m benchmarks.simulator_speed [--json] [--requests N]``."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.decisions.row import Row
from farsight.policies.compose import build_router, build_scheduler
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import A100_7B
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.traffic.workload import SimRequest

_LIMITS = SchedulerLimits(256, standby_slots=0)


def fcfs_steps(num_requests: int = 3000) -> Row:
    """Sequence-steps a second of continuous batching, first come, first served, on one replica that is always full."""
    rng = np.random.default_rng(0)
    lens = rng.integers(100, 1000, (num_requests, 2))
    arrivals = [SimRequest(f"r{i}", 0.0, int(p), int(o), 1000) for i, (p, o) in enumerate(lens)]
    fleet = Fleet(
        FleetShape(ReplicaShape(20_000), A100_7B), build_router("fcfs"), lambda i: build_scheduler("fcfs", _LIMITS)
    )
    began = time.perf_counter()
    usage = fleet.run(arrivals).usage["0"]
    rate = usage.num_sequence_steps / (time.perf_counter() - began)
    return Row("FCFS continuous batching, one replica", rate, 200_000, "sequence-steps/s", higher_is_better=True)


def e2_fleet(num_requests: int, num_replicas: int = 1000) -> list[Row]:
    """Seconds and peak memory of this process for requests of 100 output tokens; targets are those of a million."""
    shape = ReplicaShape(1875, 64, max_num_seqs=256, shares_prefixes=True)
    fleet = Fleet(
        FleetShape(shape, A100_7B, num_replicas), build_router("preble"), lambda i: build_scheduler("preble", _LIMITS)
    )
    began = time.perf_counter()
    fleet.run(_shared_prompts(num_requests, rate=3.0 * num_replicas))
    seconds = time.perf_counter() - began
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    claim = f"E2, {num_replicas} replicas, {num_requests} requests"
    return [
        Row(f"{claim}: time", seconds, 600.0 * num_requests / 1_000_000, "s"),
        Row(f"{claim}: peak memory", peak_gb, 4.0, "GB"),
    ]


def _shared_prompts(num_requests: int, rate: float) -> Iterator[SimRequest]:
    """Prompts of 256 tokens, the first 128 of them one of 500 prefixes."""
    rng = np.random.default_rng(0)
    at = 0.0
    for i in range(num_requests):
        at += float(rng.exponential(1 / rate))
        group = int(rng.integers(0, 500))
        yield SimRequest(f"r{i}", at, 256, 100, 100, (2 * group, 2 * group + 1))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator_speed", description=__doc__)
    parser.add_argument("--json", action="store_true", help="JSON lines on standard output")
    parser.add_argument("--requests", type=int, default=1_000_000, metavar="N", help="of the fleet (default: 1000000)")
    args = parser.parse_args()
    if args.requests < 1:
        parser.error("--requests: at least 1")
    rows = [fcfs_steps(), *e2_fleet(args.requests)]
    for row in rows:
        values = row.as_dict()
        print(json.dumps(values) if args.json else f"{row.claim}: {row.measured:.4g} {row.unit} ({row.verdict})")
    sys.exit(any(row.verdict == "off" for row in rows))


if __name__ == "__main__":
    main()
