"""Does the simulator predict the live server? ``python -m benchmarks.simulator_fidelity [--json]``

A server on an emulated device, whose steps take the time of its profile, serves three workloads; the requests in its
log go through the simulator with the same profile, memory and limits. The live side includes HTTP, the ingress,
messages, scheduler and worker; the difference is their cost and the jitter of real time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common.servers import RunningServer, farsight_command
from farsight import services
from farsight.core.config.engine import EngineConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.estimator.profile_file import A100_7B
from farsight.services.bench.load import Connection, measure
from farsight.services.bench.targets import BenchTarget, BodyForm, Call
from farsight.services.commands.logged_traffic import Traffic, read_traffic
from farsight.simulator.experiment import Experiment
from farsight.simulator.run import run
from farsight.simulator.traffic.workload import SimRequest
from farsight.simulator.traffic.workloads import build_workload

WORKLOADS = {"gsm8k-like": 25.0, "sharegpt-like": 3.0, "zipf": 4.0}
"""Names and requests per second: enough that requests wait."""

TOLERANCE = 0.15
MAX_MODEL_LEN = 4096
NUM_SEQS = 8
KV_TOKENS = 8_192
READY_S = 120.0
LOGGED_S = 10.0
"""Longest wait in seconds after the last answer until its record is in the log."""


@dataclass(frozen=True)
class FidelityRow:
    """Mean JCTs; ``verdict`` is ``ok`` within ``TOLERANCE``."""

    workload: str
    preset: str
    num_requests: int
    live_s: float
    simulated_s: float

    @property
    def ratio(self) -> float:
        return self.simulated_s / self.live_s

    @property
    def verdict(self) -> str:
        return "ok" if abs(self.ratio - 1) <= TOLERANCE else "off"

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "ratio": self.ratio, "verdict": self.verdict}


def main() -> int:
    """Prints a row for each workload; 1 if one is off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="fcfs", help="of continuous batching")
    parser.add_argument("--n", type=int, default=60, help="requests of each workload")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="farsight-fidelity-") as directory:
        rows = rows_of(args.preset, args.n, Path(directory))
    if args.json:
        for row in rows:
            print(json.dumps(row.as_dict()))
    else:
        Console().print(_table(rows))
    return int(any(row.verdict != "ok" for row in rows))


def rows_of(preset: str, num_requests: int, directory: Path) -> list[FidelityRow]:
    """One server for all workloads; its log is read after each."""
    engine = EngineConfig(max_num_seqs=NUM_SEQS)
    log = directory / "log.sqlite"
    config = directory / "config.toml"
    config.write_text(_toml(preset, log))
    model_dir = Path(services.__file__).parent / "embedded_model"
    command = dataclasses.replace(farsight_command(model_dir, ["--config", str(config)]), model_name="emulated")
    server = RunningServer(command, directory / "server.log")
    try:
        server.wait_until_ready(READY_S)
        server.first_token()
        return [_row(name, rate, preset, num_requests, server, log, engine) for name, rate in WORKLOADS.items()]
    finally:
        server.stop()


def _toml(preset: str, log: Path) -> str:
    memory = KV_TOKENS * A100_7B.kv_bytes // 2**20
    return f"""
[model]
name = "emulated"
[engine]
device = "emulated:a100-7b"
kv_memory = "{memory}MiB"
host_kv_memory = "{4 * memory}MiB"
prefix_cache = false
max_model_len = {MAX_MODEL_LEN}
max_num_seqs = {NUM_SEQS}
[scheduler]
preset = "{preset}"
[log]
path = {json.dumps(str(log))}
"""


def _row(
    name: str, rate: float, preset: str, num_requests: int, server: RunningServer, log: Path, engine: EngineConfig
) -> FidelityRow:
    arrivals = build_workload(name, np.random.default_rng(1), num_requests, rate)
    began_at = time.time()
    target = BenchTarget(name, server.command.base_url, server.command.model_name)
    calls = [_call(i, each, server.command.model_name) for i, each in enumerate(arrivals)]
    result = measure(target, calls, Connection(BodyForm(), keep_alive=True), [each.arrived_at for each in arrivals])
    if errors := [answer.failure for answer in result.answers if answer.failure]:
        raise RuntimeError(f"{name}: {len(errors)} requests failed, the first with {errors[0]}")
    traffic = _logged_since(log, began_at, num_requests)
    experiment = Experiment(
        scheduler=SchedulerConfig(preset=preset),
        workload=name,
        kv_tokens=KV_TOKENS,
        host_kv_tokens=4 * KV_TOKENS,
        block_size=engine.kv_block_size,
        max_num_seqs=engine.max_num_seqs,
        max_batch_tokens=engine.step_tokens,
    )
    simulated = run(experiment, traffic.arrivals()).summary.jct_s.mean
    assert isinstance(simulated, float)
    live = float(np.mean([each.request.jct_s for each in traffic.logged]))
    return FidelityRow(name, preset, num_requests, live, simulated)


def _call(index: int, arrival: SimRequest, model: str) -> Call:
    """Prompts that share nothing; where the output ends is hidden from the scheduler."""
    prompt = random.Random(index).choices(range(5, 200), k=min(arrival.prompt_len, MAX_MODEL_LEN // 2))
    output_len = min(arrival.output_len, MAX_MODEL_LEN // 2)
    max_tokens = min(arrival.max_new_tokens, MAX_MODEL_LEN - len(prompt))
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "benchmark_len": output_len}
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    return Call(index, arrival.app, json.dumps(body).encode(), output_len, exact=True)


def _logged_since(log: Path, began_at: float, num_requests: int) -> Traffic:
    """The requests of one workload, once all are in the log."""
    deadline = time.monotonic() + LOGGED_S
    while True:
        traffic = read_traffic(str(log))
        logged = [each for each in traffic.logged if each.request.received_at >= began_at]
        if len(logged) >= num_requests:
            return Traffic(logged, 0)
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(logged)} of {num_requests} requests are in the log after {LOGGED_S:g} s")
        time.sleep(0.1)


def _table(rows: list[FidelityRow]) -> Table:
    table = Table("workload", "preset", "requests", "live s", "simulated s", "ratio", "verdict")
    for row in rows:
        numbers = (f"{row.live_s:.3f}", f"{row.simulated_s:.3f}", f"{row.ratio:.3f}")
        table.add_row(row.workload, row.preset, str(row.num_requests), *numbers, row.verdict)
    return table


if __name__ == "__main__":
    sys.exit(main())
