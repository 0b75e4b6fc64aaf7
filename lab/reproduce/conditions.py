"""What decides a printed figure: one condition of a reproduction changed at a time, three seeds each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from farsight.policies.batching.fcfs import FcfsBatches
from farsight.simulator.cluster.latency import LatencyModel
from farsight.simulator.traffic.prefixes import TOOL_USE, prefix_workload
from farsight.simulator.traffic.traces import find_data, read_trace
from lab.reproduce import magnus_systems
from lab.reproduce.fast_serve import a100s
from lab.reproduce.fast_serve_systems import Load, Testbed
from lab.reproduce.fast_serve_systems import serve as serve_fast
from lab.reproduce.magnus_systems import NUM_SEATS, PaperBatcher, Stalling, continuous, draw_requests, static
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
    PrebleSystem,
    instants,
    saturation,
    simulate,
    slowed,
)
from lab.reproduce.rows import Check, Draws, Figure, OrderCheck, Printed, Reproduction, Row, near

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Condition = TypeVar("Condition")
Varied = TypeVar("Varied", bound="DataclassInstance")
Measure = Callable[[Condition, int], dict[str, float]]
Wanted = Mapping[str, Figure | float]

SEEDS = (2, 3, 4)

AS_IS = "as reproduced"
"""The condition in which nothing is changed."""


def conditions(
    name: str,
    source: str,
    settings: Mapping[str, Condition],
    measure: Measure[Condition],
    wanted: Wanted,
    seeds: Sequence[int] = SEEDS,
) -> Reproduction:
    """Declares a table, with a cell for each condition.

    Args:
        settings: Conditions by what is changed.
        measure: Returns ours by metric, for a condition and a seed.
        wanted: The printed figure of each metric, or what ours must exceed for the printed order.
    """
    cells = (partial(_rows, name, what, measure, each, wanted, seeds) for what, each in settings.items())
    return Reproduction(name, source, tuple(cells))


def _rows(
    name: str, what: str, measure: Measure[Condition], condition: Condition, wanted: Wanted, seeds: Sequence[int]
) -> list[Row]:
    found = [measure(condition, seed) for seed in seeds]
    rows = []
    for metric, printed in wanted.items():
        values = tuple(each[metric] for each in found)
        ours = float(np.mean(values))
        rows.append(Row(name, what, metric, _check(printed, ours), ours, "", Draws(len(values), values)))
    return rows


def _check(printed: Figure | float, ours: float) -> Check:
    return Printed(printed) if isinstance(printed, Figure) else OrderCheck(ours > printed, bound=printed)


def varied(base: Varied, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Varied]:
    """Returns the base as it is, and with each of the changes to its fields."""
    return {AS_IS: base, **{what: replace(base, **fields) for what, fields in changes.items()}}


def joined(name: str, source: str, tables: Sequence[Reproduction]) -> Reproduction:
    """Returns one table of several."""
    return Reproduction(name, source, tuple(cell for table in tables for cell in table.cells))


@dataclass(frozen=True, slots=True)
class Ccb:
    """CCB beside Magnus, as ``magnus_systems`` has both; each field is one thing that Magnus's paper does not say.

    Attributes:
        load: Requests a second, in units of what VS serves when swamped.
        seats, group: As in ``continuous``.
        join_s, padding: As in ``Stalling``.
        error, stretch: As in ``load_pool``.
        memory_tokens, wma_threshold: As in ``PaperBatcher``.
        roofline: The data sheet's speed and not the one fitted to the case study.
    """

    load: float = 3.0
    seats: int = NUM_SEATS
    group: int = 1
    join_s: float = 0.0
    padding: float = 1.0
    error: float = 1.0
    stretch: float = 1.0
    memory_tokens: int = magnus_systems.MEMORY_TOKENS
    wma_threshold: float = 50_000.0
    roofline: bool = False

    @property
    def latency(self) -> LatencyModel:
        return magnus_systems.DEVICE if self.roofline else magnus_systems.case_study_latency()


def magnus_over_ccb(setting: Ccb, seed: int, num_requests: int = 1500) -> dict[str, float]:
    """Returns throughput of Magnus over CCB's, and the mean response time of CCB over Magnus's."""
    pool, latency = magnus_systems.load_pool(setting.error, setting.stretch), setting.latency
    unit = static(FcfsBatches(NUM_SEATS), draw_requests(pool, 500.0, num_requests, seed), latency).throughput
    arrivals = draw_requests(pool, setting.load * unit, num_requests, seed)
    hrrn = magnus_systems.estimated_hrrn(latency)
    batcher = PaperBatcher(hrrn, memory_tokens=setting.memory_tokens, wma_threshold=setting.wma_threshold)
    ours = static(batcher, arrivals, latency)
    ccb = continuous(arrivals, Stalling(latency, setting.join_s, setting.padding), setting.seats, setting.group)
    return {
        "throughput, Magnus / CCB": ours.throughput / ccb.throughput,
        "mean response, CCB / Magnus": ccb.mean_s / ours.mean_s,
    }


MAGNUS_CONDITIONS = conditions(
    "conditions_magnus",
    "Magnus, Figs 10 and 11: what decides between it and CCB",
    varied(
        Ccb(),
        {
            "load 8": {"load": 8.0},
            "load 16": {"load": 16.0},
            "CCB: 4 places": {"seats": 4},
            "CCB: joins once 3 of 7 places are free": {"group": 3},
            "CCB: joins once 5 of 7 places are free": {"group": 5},
            "CCB: joins once all 7 have ended": {"group": 7},
            "CCB: 0.25 s at a join": {"join_s": 0.25},
            "CCB: 0.5 s at a join": {"join_s": 0.5},
            "CCB: three times the context by padding": {"padding": 3.0},
            "outputs twice as long": {"stretch": 2.0},
            "outputs four times as long": {"stretch": 4.0},
            "Magnus: lengths known": {"error": 0.0},
            "Magnus: errors four times as large": {"error": 4.0},
            "Magnus: twice the memory": {"memory_tokens": 2 * magnus_systems.MEMORY_TOKENS},
            "Magnus: Phi of 200,000": {"wma_threshold": 200_000.0},
            "steps by the data sheet": {"roofline": True},
            "load 8, outputs four times as long": {"load": 8.0, "stretch": 4.0},
        },
    ),
    magnus_over_ccb,
    {"throughput, Magnus / CCB": 1.0, "mean response, CCB / Magnus": 1.0},
)

_BED = a100s("opt-2.7b", batch_size=16)
_LOAD = Load(32.0, 4.0, 0.9, 2048, 20, 400)


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of FastServe on one GPU.

    Attributes:
        quantum: How many times the shortest iteration the first quantum is.
        memory, link, speed: Shares of the GPU's.
        slots, blocks: Whether a deferred job needs room for all of it, and steps wait for what Reactive copies.
    """

    load: Load = _LOAD
    quantum: float = 1.0
    ratio: float = 2.0
    batch_size: int = 16
    memory: float = 1.0
    link: float = 1.0
    speed: float = 1.0
    slots: bool = True
    blocks: bool = True

    @property
    def bed(self) -> Testbed:
        gpu, kv_tokens = _BED.device.gpu, int(self.memory * _BED.kv_tokens)
        gpu = replace(gpu, host_bandwidth=self.link * gpu.host_bandwidth)
        device = replace(_BED.device, gpu=gpu, efficiency=self.speed * _BED.device.efficiency)
        return replace(_BED, device=device, batch_size=self.batch_size, kv_tokens=kv_tokens, ratio=self.ratio)


def _mean_s(point: Point, seed: int, preset: str, mlfq: str = "skip-join", admission: str = "") -> float:
    bed = point.bed
    config = replace(bed.scheduler, mlfq=mlfq, quantum_s=point.quantum * bed.quantum_s)
    blocks = preset == "fastserve-reactive" and point.blocks
    done = serve_fast(bed, replace(point.load, seed=seed), preset, config, blocks, admission=admission).done
    return float(np.mean([record.jct_s for record in done]))


def mlfq_over_ours(point: Point, seed: int) -> dict[str, float]:
    """Returns the mean JCT of both baselines of Figure 10 over FastServe's."""
    ours_s = _mean_s(point, seed, "fastserve")
    return {
        "MLFQ / FastServe": _mean_s(point, seed, "fastserve", "no-preemption") / ours_s,
        "MLFQ with preemption / FastServe": _mean_s(point, seed, "fastserve", "preemption") / ours_s,
    }


def swapping_over_ours(point: Point, seed: int) -> dict[str, float]:
    """Returns the mean JCT of both ways to go without proactive swapping over FastServe's."""
    ours_s = _mean_s(point, seed, "fastserve")
    deferred_s = _mean_s(point, seed, "fastserve-defer", admission="conservative" if point.slots else "")
    reactive_s = _mean_s(point, seed, "fastserve-reactive")
    return {"defer / FastServe": deferred_s / ours_s, "reactive / FastServe": reactive_s / ours_s}


def peak_ratio(point: Point, seed: int) -> dict[str, float]:
    """Returns the most KV tokens of FastServe at once over those of FCFS (section 4.2)."""
    load = replace(point.load, seed=seed)
    ours, there = (serve_fast(point.bed, load, preset).usage["0"].peak_tokens for preset in ("fastserve", "fcfs"))
    return {"peak KV, SJ-MLFQ / FCFS": ours / there}


_TIGHT = Point(Load(8.0, 4.0, 0.9, 2048, 2048, 200), memory=1 / 4)
_FAST = Point(replace(_LOAD, rate=64.0))
FASTSERVE_CONDITIONS = (
    conditions(
        "conditions_fastserve",
        "FastServe, Fig 10: what decides between it and MLFQ",
        varied(
            Point(),
            {
                "rate 64": {"load": replace(_LOAD, rate=64.0)},
                "CV 12": {"load": replace(_LOAD, cv=12.0)},
                "theta 0.4": {"load": replace(_LOAD, theta=0.4)},
                "a first quantum 1/4 as long": {"quantum": 0.25},
                "quantum ratio 16": {"ratio": 16.0},
                "outputs up to 200": {"load": replace(_LOAD, longest_output=200)},
                "batches of 1": {"batch_size": 1},
                "batches of 64": {"batch_size": 64},
                "1/8 of the memory": {"memory": 1 / 8},
                "a quarter of the speed": {"speed": 1 / 4},
            },
        ),
        mlfq_over_ours,
        {"MLFQ / FastServe": near(24.0, share=0.25), "MLFQ with preemption / FastServe": 1.0},
    ),
    conditions(
        "conditions_fastserve_swapping",
        "FastServe, Fig 11: what decides between it and Defer or Reactive",
        varied(
            _TIGHT,
            {
                "places and copies as in the engine": {"slots": False, "blocks": False},
                "the same, rate 16": {"slots": False, "blocks": False, "load": replace(_TIGHT.load, rate=16.0)},
                "rate 4": {"load": replace(_TIGHT.load, rate=4.0)},
                "rate 16": {"load": replace(_TIGHT.load, rate=16.0)},
                "batches of 64": {"batch_size": 64},
                "1/8 of the link": {"link": 1 / 8},
                "1/16 of the memory": {"memory": 1 / 16},
            },
        ),
        swapping_over_ours,
        {"defer / FastServe": near(2.3, share=0.25), "reactive / FastServe": near(1.6, share=0.25)},
    ),
    conditions(
        "conditions_fastserve_peak",
        "FastServe, section 4.2: what decides the peak of KV",
        varied(
            _FAST,
            {
                "rate 256": {"load": replace(_LOAD, rate=256.0)},
                "a quarter of the speed": {"speed": 1 / 4},
                "CV 12": {"load": replace(_FAST.load, cv=12.0)},
                "800 requests": {"load": replace(_FAST.load, num_requests=800)},
            },
        ),
        peak_ratio,
        {"peak KV, SJ-MLFQ / FCFS": near(7.0, share=0.25)},
    ),
)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Figure 8's workload of Preble on four A6000.

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


def mixed_factors(setting: Mixed, seed: int) -> dict[str, float]:
    """Returns the latencies of round-robin over those of Preble."""
    cluster = replace(FOUR_A6000, capacity=setting.capacity, seats=setting.seats)
    trace = read_trace(find_data("azure2023_conv.csv.gz"), "azure")[: setting.num_requests]
    drawn = coin_mix(np.random.default_rng(seed), [each.arrived_at for each in trace], setting.tools)
    span_s = drawn[-1].arrived_at - drawn[0].arrived_at
    rate = setting.load * saturation(cluster, drawn)
    arrivals = slowed(drawn, len(drawn) / span_s / rate)
    there = simulate(cluster, replace(ROUND_ROBIN, chunk=setting.baseline_chunk), arrivals)
    ours = simulate(cluster, replace(PREBLE, chunk=setting.chunk), arrivals)
    return {f"{metric} factor": getattr(there, f"{metric}_s") / getattr(ours, f"{metric}_s") for metric in MIXED}


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


_REBALANCE, _GROUPS = PartAt(E2_REBALANCED, E2_ALONE), PartAt(PREBLE, E2_WHOLE)
PREBLE_CONDITIONS = (
    conditions(
        "conditions_preble",
        "Preble, Fig 8: what decides its factors over round-robin",
        varied(
            Mixed(),
            {
                "load 0.8": {"load": 0.8},
                "load 1.5": {"load": 1.5},
                "whole prompts under round-robin": {"baseline_chunk": WHOLE_PROMPTS},
                "whole prompts under both": {"baseline_chunk": WHOLE_PROMPTS, "chunk": WHOLE_PROMPTS},
                "three quarters videos": {"tools": 0.25},
                "32 places": {"seats": 32},
            },
        ),
        mixed_factors,
        {f"{metric} factor": near(printed, share=0.25) for metric, printed in MIXED.items()},
        seeds=(8, 9, 10),
    ),
    conditions(
        "conditions_preble_parts",
        "Preble, Fig 10: loads under which its later parts act",
        {
            "rebalance, Zipf 1.1, load 1": _REBALANCE,
            "rebalance, Zipf 1.6, load 2": replace(_REBALANCE, zipf=1.6, load=2.0),
            "rebalance, Zipf 2.5, load 2": replace(_REBALANCE, zipf=2.5, load=2.0),
            "priority groups, load 2": replace(_GROUPS, load=2.0),
            "rebalance, programs, load 1": replace(_REBALANCE, programs=True),
            "priority groups, 16 places, load 1": replace(_GROUPS, seats=16),
            "priority groups, 16 places, load 1.5": replace(_GROUPS, seats=16, load=1.5),
        },
        part_ratio,
        {"mean without / with": 1.0, "p99 without / with": 1.0},
    ),
)
