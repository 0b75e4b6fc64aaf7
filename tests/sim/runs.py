"""Runs for tests: steps of one second, so that every number can be had by hand."""

from __future__ import annotations

from collections.abc import Sequence

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import StepCost
from farsight.policies.compose import build_router, build_scheduler
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.policies.settings import PolicySettings
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import LatencyModel, LinearLatency
from farsight.simulator.cluster.records import Timeline
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.traffic.workload import SimRequest

STEP = LinearLatency(StepCost(1.0, 0.0, 0.0, 0.0))
"""Every step takes a second, whatever is in it."""


def make_fleet(
    num_tokens: int = 1000,
    *,
    num_replicas: int = 1,
    max_num_seqs: int = 256,
    max_batch_tokens: int = 2048,
    watermark: float = 1.0,
    kv: str = "recompute-newest",
    timeline: Timeline | None = None,
    clients: int | None = None,
    latency: LatencyModel = STEP,
) -> tuple[Fleet, ReplicaShape]:
    """Replicas of ``fcfs`` with KV blocks of one token."""
    shape = ReplicaShape(
        num_tokens, 1, num_host_blocks=1000, max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens
    )
    limits = SchedulerLimits(max_num_seqs, 0)
    fleet = Fleet(
        FleetShape(shape, latency, num_replicas),
        build_router("fcfs"),
        lambda _: build_scheduler(
            "fcfs", limits, PolicySettings(SchedulerConfig(watermark=watermark, max_gap_ms=0.0)), kv=kv
        ),
        timeline=timeline,
        clients=clients,
    )
    return fleet, shape


def arrivals(*requests: tuple[float, int, int]) -> Sequence[SimRequest]:
    """Arrivals from (instant, prompt tokens, output tokens)."""
    return [SimRequest(f"r{i}", at, prompt, output, output) for i, (at, prompt, output) in enumerate(requests)]
