"""Presets side by side on a model that computes: ``python -m benchmarks.real_presets --model DIR --profile FILE``.

Three headlines of the emulated device (``benchmarks.live_presets``) as they come here, beside what the simulator
predicts from the profile that ``farsight profile`` has measured of this model on this machine. Requests are those of
the eight text tasks, at a rate of ``load`` times what FCFS gets through in the simulator. The service is one process,
which the model shares with everything else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.live_presets.live import Hardware, run_live
from benchmarks.live_presets.runs import Figures, figures
from estimator.device_profile import DeviceProfile, find_device_profile
from simulator import predictors
from simulator.cluster.latency import LinearLatency
from simulator.compare import paired_ratio
from simulator.experiment import Experiment
from simulator.run import run as simulate
from simulator.summary import Sla
from simulator.traffic.arrivals import Poisson
from simulator.traffic.workload import SimRequest
from simulator.traffic.workloads import build_workload, retime

MAX_LEN = 2000
"""Most tokens of prompt and output together: the context of the model of ``benchmarks.make_model``."""

SIGMA = 0.5
"""Sigma of the forecasts' noise, as in the simulated cells."""


@dataclass(frozen=True, slots=True)
class Headline:
    """A figure of one preset over that of another."""

    claim: str
    ours: str
    base: str
    metric: str
    load: float
    execution: str = "ragged"


HEADLINES = (
    Headline("fastserve / fcfs: mean JCT", "fastserve", "fcfs", "jct_s", 1.1),
    Headline("past-future / aggressive: goodput", "past-future", "aggressive", "goodput", 1.1),
    Headline("magnus / magnus-vs, static: throughput", "magnus", "magnus-vs", "throughput", 1.1, "static"),
)


@dataclass(frozen=True, slots=True)
class Bench:
    """A model on this machine.

    Attributes:
        profile: Its measured profile.
        kv_tokens: Tokens of its KV pool.
        sla: Seconds to the first token, and between two.
    """

    model: Path
    profile: DeviceProfile
    num_requests: int
    kv_tokens: int
    max_num_seqs: int
    sla: Sla

    def arrivals(self, seed: int, load: float) -> list[SimRequest]:
        """Poisson arrivals with forecasts; load 1 is FCFS's throughput with all requests queued, less the last 15 %."""
        rng = np.random.default_rng(seed)
        drawn = build_workload("apps8", rng, 2 * self.num_requests)
        fitting = [each for each in drawn if each.prompt_len + each.output_len <= MAX_LEN]
        requests = [
            replace(each, max_new_tokens=min(each.max_new_tokens, MAX_LEN - each.prompt_len))
            for each in fitting[: self.num_requests]
        ]
        at_once = self.simulated("fcfs", retime(requests, np.zeros(len(requests))))
        ends = sorted(record.finished_at for record in at_once)
        num_done = int(0.85 * len(ends))
        times = Poisson(load * num_done / ends[num_done - 1]).sample(rng, len(requests))
        return predictors.Noisy(SIGMA, seed)(retime(requests, times))

    def simulated(self, preset: str, arrivals: list[SimRequest]) -> list[Any]:
        latency = LinearLatency(self.profile.cost, self.profile.kv_bytes, self.profile.copy_bandwidth or 5e9)
        experiment = Experiment(
            preset=preset,
            latency=latency,
            kv_tokens=self.kv_tokens,
            host_kv_tokens=4 * self.kv_tokens,
            max_num_seqs=self.max_num_seqs,
            max_batch_tokens=512 + self.max_num_seqs,
        )
        return simulate(experiment, arrivals).recorder.done

    def live(self, preset: str, execution: str, arrivals: list[SimRequest]) -> Figures:
        hardware = Hardware(
            self.profile, self.kv_tokens, 4 * self.kv_tokens, self.max_num_seqs, 512 + self.max_num_seqs
        )
        settings = {"scheduler": {"preset": preset, "execution": execution}}
        served = run_live(arrivals, hardware, settings, model=self.model)
        return figures(served.records, self.sla, served.num_preemptions / len(arrivals))

    def rows(self, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """The measured figure and the simulator's prediction for each headline."""

        @cache
        def measured(preset: str, execution: str, load: float, seed: int) -> tuple[Figures, Figures]:
            arrivals = self.arrivals(seed, load)
            live = self.live(preset, execution, arrivals)
            records = self.simulated(preset, arrivals)
            evictions = sum(each.num_evictions + each.num_swaps for each in records) / len(records)
            print(f"{preset}, seed {seed}: mean JCT {live.jct_s:.2f} s", file=sys.stderr)
            return live, figures(records, self.sla, evictions)

        rows = []
        for headline in HEADLINES:
            pairs: list[list[tuple[float, float]]] = [[], []]
            for seed in seeds:
                ours, base = (
                    measured(preset, headline.execution, headline.load, seed)
                    for preset in (headline.ours, headline.base)
                )
                for found, mine, theirs in zip(pairs, ours, base, strict=True):
                    found.append((getattr(mine, headline.metric), getattr(theirs, headline.metric)))
            live, simulated = (paired_ratio([*found]) for found in pairs)
            row: dict[str, Any] = {"claim": headline.claim, "seeds": len(seeds), "requests": self.num_requests}
            for name, ratio in (("live", live), ("simulated", simulated)):
                row |= {name: None if ratio is None else ratio.mean}
                row |= {f"{name}_low": ratio and ratio.low, f"{name}_high": ratio and ratio.high}
            rows.append(row)
        return rows


def main() -> None:
    """Prints a line for each headline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of `benchmarks.make_model`")
    parser.add_argument("--profile", required=True, help="of `farsight profile`")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--kv-tokens", type=int, default=16_000)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--sla-ttft", type=float, default=10.0)
    parser.add_argument("--sla-mtpot", type=float, default=1.5)
    parser.add_argument("--data", type=Path, help="folder of the data sets [FARSIGHT_DATA]")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.data is not None:
        os.environ["FARSIGHT_DATA"] = str(args.data)
    profile = find_device_profile(args.profile)
    sla = Sla(args.sla_ttft, args.sla_mtpot)
    bench = Bench(args.model, profile, args.requests, args.kv_tokens, args.max_num_seqs, sla)
    for row in bench.rows(range(1, args.seeds + 1)):
        print(json.dumps(row) if args.json else "  ".join(f"{name}: {_cell(value)}" for name, value in row.items()))


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
