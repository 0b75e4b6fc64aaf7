"""Preble against round-robin (Figure 8), and the loads under which its later parts act (Figure 10)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from farsight.simulator.traffic.prefixes import TOOL_USE, prefix_workload
from farsight.simulator.traffic.traces import find_data, read_trace
from lab.reproduce.conditions.table import AS_IS, conditions
from lab.reproduce.preble.figures import MIXED, coin_mix
from lab.reproduce.preble.parts import NUM_TOOLS, WHOLE_PROMPTS, flat, programs
from lab.reproduce.preble.runs import (
    A6000_TOKENS,
    BLOCK,
    E2_ALONE,
    E2_REBALANCED,
    E2_WHOLE,
    FOUR_A6000,
    PREBLE,
    ROUND_ROBIN,
    PrebleCluster,
    PrebleSystem,
    instants,
    saturation,
    simulate,
    slowed,
)
from lab.reproduce.rows import near

SEEDS = (8, 9, 10)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Figure 8's workload on four A6000.

    Attributes:
        load: In units of what round-robin completes a second when all requests are there at the start.
        tools: Share of requests that use tools; the others ask about videos.
        baseline_chunk, chunk: Prompt tokens of a step under round-robin and under Preble.
        capacity: KV tokens of a replica.
        seats: Places of a batch.
        num_requests: From the beginning of Azure's trace.
    """

    load: float = 1.0
    tools: float = 0.5
    baseline_chunk: int = 2048
    chunk: int = 2048
    capacity: int = A6000_TOKENS
    seats: int = 256
    num_requests: int = 1000

    @property
    def cluster(self) -> PrebleCluster:
        return replace(FOUR_A6000, capacity=self.capacity, seats=self.seats)


def mixed_factors(setting: Mixed, seed: int) -> dict[str, float]:
    """Returns the latencies of round-robin over those of Preble."""
    trace = read_trace(find_data("azure2023_conv.csv.gz"), "azure")[: setting.num_requests]
    drawn = coin_mix(np.random.default_rng(seed), [each.arrived_at for each in trace], setting.tools)
    span_s = drawn[-1].arrived_at - drawn[0].arrived_at
    rate = setting.load * saturation(setting.cluster, drawn)
    arrivals = slowed(drawn, len(drawn) / span_s / rate)
    there = simulate(setting.cluster, replace(ROUND_ROBIN, chunk=setting.baseline_chunk), arrivals)
    ours = simulate(setting.cluster, replace(PREBLE, chunk=setting.chunk), arrivals)
    return {
        "mean factor": there.mean_s / ours.mean_s,
        "p99 factor": there.p99_s / ours.p99_s,
        "ttft factor": there.ttft_s / ours.ttft_s,
        "tpot factor": there.tpot_s / ours.tpot_s,
    }


_BASE = Mixed()
MIXED_SETTINGS = {
    AS_IS: _BASE,
    "load 0.8": replace(_BASE, load=0.8),
    "load 1.5": replace(_BASE, load=1.5),
    "whole prompts under round-robin": replace(_BASE, baseline_chunk=WHOLE_PROMPTS),
    "whole prompts under both": replace(_BASE, baseline_chunk=WHOLE_PROMPTS, chunk=WHOLE_PROMPTS),
    "three quarters videos": replace(_BASE, tools=0.25),
    "32 places": replace(_BASE, seats=32),
}


@dataclass(frozen=True, slots=True)
class PartAt:
    """A part of Preble on tools, against the system without it.

    Attributes:
        part, without: The system with and without the part.
        load: As in ``Mixed``.
        zipf: Exponent of the law by which tools are chosen.
        seats: Places of a batch.
        programs: Programs, which share one system prompt, in the place of tools.
    """

    part: PrebleSystem
    without: PrebleSystem
    load: float = 1.0
    zipf: float = 1.1
    seats: int = 256
    programs: bool = False
    num_requests: int = 1000


def part_ratio(setting: PartAt, seed: int) -> dict[str, float]:
    """Returns mean and p99 without the part over those with it."""
    cluster = replace(FOUR_A6000, seats=setting.seats)
    if setting.programs:
        arrivals = slowed(programs(setting.num_requests, seed), 1 / setting.load)
    else:
        rng = np.random.default_rng(seed)
        at = instants(rng, setting.num_requests, 1.0)
        drawn = prefix_workload(rng, at, flat(TOOL_USE), NUM_TOOLS, BLOCK, popularity=setting.zipf)
        arrivals = slowed(drawn, 1 / (setting.load * saturation(cluster, drawn)))
    with_it, without = (simulate(cluster, system, arrivals) for system in (setting.part, setting.without))
    return {
        "mean without / with": without.mean_s / with_it.mean_s,
        "p99 without / with": without.p99_s / with_it.p99_s,
    }


_REBALANCE = PartAt(E2_REBALANCED, E2_ALONE)
_GROUPS = PartAt(PREBLE, E2_WHOLE)
PART_SETTINGS = {
    "rebalance, Zipf 1.1, load 1": _REBALANCE,
    "rebalance, Zipf 1.6, load 2": replace(_REBALANCE, zipf=1.6, load=2.0),
    "rebalance, Zipf 2.5, load 2": replace(_REBALANCE, zipf=2.5, load=2.0),
    "priority groups, load 2": replace(_GROUPS, load=2.0),
    "rebalance, programs, load 1": replace(_REBALANCE, programs=True),
    "priority groups, 16 places, load 1": replace(_GROUPS, seats=16),
    "priority groups, 16 places, load 1.5": replace(_GROUPS, seats=16, load=1.5),
}

PREBLE_CONDITIONS = (
    conditions(
        "conditions_preble",
        "Preble, Fig 8: what decides its factors over round-robin",
        MIXED_SETTINGS,
        mixed_factors,
        {f"{metric} factor": near(printed, share=0.25) for metric, printed in MIXED.items()},
        SEEDS,
    ),
    conditions(
        "conditions_preble_parts",
        "Preble, Fig 10: loads under which its later parts act",
        PART_SETTINGS,
        part_ratio,
        {"mean without / with": 1.0, "p99 without / with": 1.0},
    ),
)
