"""The systems that FastServe (arXiv 2305.05920) compares, on its testbeds as far as those are known."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from farsight.core.config.scheduling import SchedulerConfig
from farsight.policies.batching.fcfs import FcfsBatches
from farsight.policies.compose import build_router, build_scheduler
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.policies.settings import PolicySettings
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import LatencyModel, Roofline
from farsight.simulator.cluster.records import Recorder
from farsight.simulator.cluster.replica import Replica, ReplicaShape
from farsight.simulator.traffic.arrivals import Gamma
from farsight.simulator.traffic.lengths import LengthPair, ZipfLengths
from farsight.simulator.traffic.workload import SimRequest
from farsight.simulator.traffic.workloads import draw
from lab.reproduce.padded import padded_fleet
from lab.reproduce.pipelined import PipelinedReplica, PipelineLatency
from lab.reproduce.rows import ARTIFACT, FIXED_QUANTUM

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Load:
    """Gamma arrivals of requests whose prompt and output lengths follow one Zipf law."""

    rate: float
    cv: float
    theta: float
    longest_prompt: int
    longest_output: int
    num_requests: int
    seed: int = 1

    def arrivals(self) -> list[SimRequest]:
        rng = np.random.default_rng(self.seed)
        lengths = LengthPair(
            ZipfLengths(self.theta, self.longest_prompt),
            ZipfLengths(self.theta, self.longest_output),
            self.longest_output,
        )
        return draw("zipf", lengths, Gamma(self.rate, self.cv), rng, self.num_requests)


@dataclass(frozen=True)
class Testbed:
    """Devices with a model, and the limits of a batch.

    Attributes:
        batch_size: Sequences of one batch; each pipeline stage has a batch of its own in flight.
        kv_tokens: KV of the device.
        host_tokens: KV of the host.
    """

    device: Roofline
    batch_size: int
    kv_tokens: int
    host_tokens: int
    starve_limit_s: float = math.inf
    ratio: float = 2.0

    @cached_property
    def latency(self) -> LatencyModel:
        """Time of one batch in all stages together."""
        return self.device if self.device.pipeline_parallel == 1 else PipelineLatency(self.device)

    @cached_property
    def quantum_s(self) -> float:
        """q_1, the shortest iteration time; in a pipeline the shortest time between two steps' ends."""
        return self.latency.cost.prefill_s(1)

    @property
    def scheduler(self) -> SchedulerConfig:
        return replace(ARTIFACT, quantum_s=self.quantum_s, quantum_ratio=self.ratio, starve_limit_s=self.starve_limit_s)

    def baseline(self, mlfq: str) -> SchedulerConfig:
        """The same of a baseline of section 6.3, as ``[scheduler] mlfq`` names it."""
        return replace(self.scheduler, mlfq=mlfq)


def serve(
    bed: Testbed,
    load: Load,
    preset: str,
    config: SchedulerConfig | None = None,
    copies_block: bool = False,
    **parts: str,
) -> Recorder:
    """One replica, with a batch of ``bed.batch_size`` in each stage of its pipeline."""
    num_stages = bed.device.pipeline_parallel
    preemptive = preset.startswith("fastserve")
    shape = ReplicaShape(
        bed.kv_tokens // BLOCK_SIZE,
        BLOCK_SIZE,
        bed.host_tokens // BLOCK_SIZE,
        max_num_seqs=bed.batch_size,
        max_batch_tokens=2048,
        look_every=1 if preemptive else 0,
        num_stages=num_stages,
        copies_block=copies_block,
    )
    settings = PolicySettings(config or bed.scheduler, cost=bed.latency.cost, mlfq=FIXED_QUANTUM)
    limits = SchedulerLimits(bed.batch_size * num_stages, 0)
    fleet = Fleet(
        FleetShape(shape, bed.latency, kind=PipelinedReplica if num_stages > 1 else Replica),
        build_router("fcfs"),
        lambda _: build_scheduler(preset, limits, settings, **parts),
    )
    return fleet.run(load.arrivals())


def serve_batches(bed: Testbed, load: Load) -> Recorder:
    """FasterTransformer: a batch runs until its longest output ends, and the stages of the pipeline take turns."""
    alone = replace(bed.device, pipeline_parallel=1)
    return padded_fleet(FcfsBatches(bed.batch_size), alone).run(load.arrivals())
