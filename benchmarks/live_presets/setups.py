"""The cells of the claims, and the systems that are compared in them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.live_presets.live import Hardware
from benchmarks.live_presets.study import System
from farsight.core.config.scheduling import BatchConfig, SchedulerConfig
from farsight.estimator.profile_file import A100_7B
from farsight.policies.compose import build_scheduler
from farsight.policies.settings import PolicySettings
from farsight.simulator import predictors
from farsight.simulator.cluster.latency import A100_7B as LATENCY
from farsight.simulator.cluster.records import Record
from farsight.simulator.experiment import Experiment
from farsight.simulator.run import run as run_experiment
from farsight.simulator.summary import Sla
from farsight.simulator.traffic.arrivals import AllAtOnce
from farsight.simulator.traffic.lengths import LengthPair, Uniform
from farsight.simulator.traffic.workload import SimRequest
from farsight.simulator.traffic.workloads import draw
from lab.reproduce import combined
from lab.reproduce.combined import HOST_TOKENS, CombinedCell, Policy

FILLED_S = 30.0
"""In the paper Multi-Bin's batches wait until they are full; here for at most so many seconds."""

CHUNK = 512
"""Prompt tokens of one step beside the decodes, as in the simulated cells."""


@dataclass(frozen=True, slots=True)
class DrawnCell(CombinedCell):
    """A cell of one law of lengths; ``workload`` is its name only."""

    lengths: LengthPair = field(kw_only=True)

    def _requests(self, seed: int, index: int) -> list[SimRequest]:
        return draw(self.name, self.lengths, AllAtOnce(), np.random.default_rng(seed), self.num_requests)


@dataclass(frozen=True, slots=True)
class Setup:
    """A cell, and how its requests are judged and predicted.

    Attributes:
        forecasts: As in ``CombinedCell.with_forecasts``, or ``oracle``.
    """

    cell: CombinedCell
    sla: Sla = field(default_factory=Sla)
    forecasts: str = "given"
    num_warmup = 0

    @property
    def num_requests(self) -> int:
        return self.cell.num_requests

    def arrivals(self, seed: int) -> list[SimRequest]:
        """Arrivals with forecasts; the load is defined as in the simulated cells, so their oracle runs once before."""
        arrivals = self.cell.arrivals(seed, 0)
        if self.forecasts == "oracle":
            return predictors.oracle(arrivals)
        return self.cell.with_forecasts(arrivals, seed, self.forecasts)

    def sized(self, num_requests: int) -> Setup:
        """With another number of requests."""
        return replace(self, cell=replace(self.cell, num_requests=num_requests))

    @property
    def hardware(self) -> Hardware:
        cell = self.cell
        return Hardware(A100_7B, cell.kv_tokens, HOST_TOKENS, cell.max_num_seqs, CHUNK + cell.max_num_seqs)


_SETTINGS = PolicySettings(cost=LATENCY.cost)


def _eighth(prompt: tuple[int, int], output: tuple[int, int]) -> LengthPair:
    """Lengths of Past-Future's mixes; lengths, memory and time limits are divided by 8 to keep runs short."""
    (p, q), (a, b) = prompt, output
    return LengthPair(Uniform(p // 8, q // 8), Uniform(a // 8, b // 8), b // 8)


_D1 = _eighth((32, 4096), (2048, 4096))
_D3 = _eighth((2048, 4096), (32, 4096))
_D_SLA = Sla(10 / 8, 1.5 / 8)
_D_KV = 121_060 // 8
_BINS = LengthPair(Uniform(16, 128), Uniform(8, 256), 256)

_TEXTS = CombinedCell("i256", "apps8", 1.1, 30_000)
_ZIPF = CombinedCell("zipf", "zipf", 1.1, 30_000, num_requests=500, cv=4.0)

SETUPS: dict[str, Setup] = {
    "i256 1.1": Setup(_TEXTS),
    "i256 0.9": Setup(replace(_TEXTS, load=0.9, num_requests=2000)),
    "i256 1.1, short": Setup(replace(_TEXTS, num_requests=800)),
    "zipf 1.1": Setup(_ZIPF),
    "zipf15 0.9": Setup(replace(_ZIPF, name="zipf15", load=0.9, kv_tokens=15_000)),
    "D1/8 1.0": Setup(DrawnCell("d1", "d1", 1.0, _D_KV, num_requests=200, lengths=_D1), _D_SLA, "none"),
    "D3/8 1.0": Setup(DrawnCell("d3", "d3", 1.0, _D_KV, num_requests=200, lengths=_D3), _D_SLA, "none"),
    "i64 0.5": Setup(CombinedCell("i64", "apps8", 0.5, 121_000, num_requests=200, max_num_seqs=64)),
    "bins": Setup(DrawnCell("bins", "bins", 1.0, 121_000, num_requests=256, lengths=_BINS), forecasts="oracle"),
}
"""i256, zipf and D as in the simulated cells of the combined policy; D1 and D3 as Past-Future's, an eighth as long."""


def _continuous(preset: str, look_every: int, setup: Setup, arrivals: list[SimRequest]) -> list[Record]:
    policy = Policy(lambda limits: build_scheduler(preset, limits, _SETTINGS), look_every=look_every)
    return combined.run(setup.cell, arrivals, policy)


def _batches(preset: str, batch: BatchConfig, setup: Setup, arrivals: list[SimRequest]) -> list[Record]:
    cell = setup.cell
    experiment = Experiment(
        scheduler=SchedulerConfig(preset=preset, execution="static"),
        kv_tokens=cell.kv_tokens,
        max_num_seqs=cell.max_num_seqs,
        max_batch_tokens=CHUNK + cell.max_num_seqs,
        batch=batch,
    )
    return run_experiment(experiment, arrivals).recorder.done


def _system(preset: str, look_every: int = 4) -> System:
    return System({"scheduler": {"preset": preset}}, partial(_continuous, preset, look_every))


def _static(preset: str, **batch: Any) -> System:
    settings: dict[str, dict[str, Any]] = {"scheduler": {"preset": preset, "execution": "static"}}
    return System(settings | ({"batch": batch} if batch else {}), partial(_batches, preset, BatchConfig(**batch)))


SYSTEMS: dict[str, System] = {
    "fcfs": _system("fcfs", 0),
    "aggressive": _system("aggressive", 0),
    "conservative": _system("conservative", 0),
    "past-future": _system("past-future", 1),
    "fastserve": _system("fastserve"),
    "fastserve-reactive": _system("fastserve-reactive"),
    "fastserve-defer": _system("fastserve-defer"),
    "farsight-mean": _system("farsight-mean"),
    "magnus": _static("magnus"),
    "magnus-vs": _static("magnus-vs"),
    "multi-bin, 8 bins": _static("multi-bin", num_bins=8, max_wait_s=FILLED_S),
    "multi-bin, 1 bin": _static("multi-bin", num_bins=1, max_wait_s=FILLED_S),
}
