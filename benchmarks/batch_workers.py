"""Batch mode over several workers, live beside the simulator: ``python -m benchmarks.batch_workers``.

All requests are queued at the start; idle workers pull them in batches from one queue. The live run has real components
in one process over emulated devices (``a100-7b``); the simulator runs the same requests. The table shows requests per
second, and their ratio to those of one worker.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.live_presets.live import Hardware, run_live
from core.config.scheduling import BatchConfig, SchedulerConfig
from estimator.device_profile import A100_7B
from simulator import predictors
from simulator.cluster.records import Record
from simulator.experiment import Experiment
from simulator.run import run as simulate
from simulator.traffic.arrivals import AllAtOnce
from simulator.traffic.lengths import LengthPair, Uniform
from simulator.traffic.workload import SimRequest
from simulator.traffic.workloads import draw

LENGTHS = LengthPair(Uniform(16, 128), Uniform(8, 256), 256)
KV_TOKENS = 121_000
MAX_NUM_SEQS = 256
CHUNK = 512
PRESETS = ("magnus", "multi-bin")
BATCH: dict[str, Any] = {"num_bins": 8, "max_wait_s": 1.0}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seed", type=int, default=11)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    args = parse(words)
    drawn = draw("bins", LENGTHS, AllAtOnce(), np.random.default_rng(args.seed), args.requests)
    arrivals = predictors.oracle(drawn)
    print(f"{'preset':10} {'workers':>7} {'live req/s':>11} {'x':>5} {'simulated':>10} {'x':>5} {'lag ms':>7}")
    for preset in PRESETS:
        alone: tuple[float, float] | None = None
        for num in args.workers:
            live, lag_s = _live(preset, arrivals, num)
            simulated = _simulated(preset, arrivals, num)
            alone = alone or (live, simulated)
            times = live / alone[0], simulated / alone[1]
            cells = f"{live:11.2f} {times[0]:5.2f} {simulated:10.2f} {times[1]:5.2f} {1e3 * lag_s:7.1f}"
            print(f"{preset:10} {num:7d} {cells}", flush=True)


def _live(preset: str, arrivals: list[SimRequest], num_workers: int) -> tuple[float, float]:
    """Requests per second, and the mean lateness of a timer."""
    hardware = Hardware(A100_7B, KV_TOKENS, 0, MAX_NUM_SEQS, CHUNK + MAX_NUM_SEQS)
    settings: dict[str, dict[str, Any]] = {
        "scheduler": {"preset": preset, "execution": "static"},
        "model": {"replicas": num_workers},
        "batch": dict(BATCH),
    }
    served = run_live(arrivals, hardware, settings)
    return _throughput(served.records), served.lag_s


def _simulated(preset: str, arrivals: list[SimRequest], num_workers: int) -> float:
    experiment = Experiment(
        scheduler=SchedulerConfig(preset=preset, execution="static"),
        kv_tokens=KV_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        max_batch_tokens=CHUNK + MAX_NUM_SEQS,
        num_replicas=num_workers,
        batch=BatchConfig(**BATCH),
    )
    return _throughput(simulate(experiment, arrivals).recorder.done)


def _throughput(records: Sequence[Record]) -> float:
    return len(records) / (max(record.finished_at for record in records) - records[0].arrival.arrived_at)


if __name__ == "__main__":
    main()
