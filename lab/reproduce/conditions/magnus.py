"""Magnus against CCB (Figures 10 and 11): which condition makes continuous batching fall behind, as printed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from farsight.policies.batching.fcfs import FcfsBatches
from farsight.simulator.cluster.latency import LatencyModel
from lab.reproduce.conditions.table import AS_IS, conditions
from lab.reproduce.magnus_systems import (
    DEVICE,
    MEMORY_TOKENS,
    NUM_SEATS,
    MagnusOutcome,
    PaperBatcher,
    Stalling,
    case_study_latency,
    continuous,
    draw_requests,
    estimated_hrrn,
    load_pool,
    static,
)

NUM_REQUESTS = 1500


@dataclass(frozen=True, slots=True)
class Ccb:
    """CCB beside Magnus, as ``magnus_systems`` has both; each field is one thing that the paper does not say.

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
    memory_tokens: int = MEMORY_TOKENS
    wma_threshold: float = 50_000.0
    roofline: bool = False

    @property
    def latency(self) -> LatencyModel:
        return DEVICE if self.roofline else case_study_latency()


def magnus_over_ccb(setting: Ccb, seed: int) -> dict[str, float]:
    """Returns the gain of throughput and the cut of the mean response time, in per cent."""
    pool, latency = load_pool(setting.error, setting.stretch), setting.latency
    unit = static(FcfsBatches(NUM_SEATS), draw_requests(pool, 500.0, NUM_REQUESTS, seed), latency).throughput
    arrivals = draw_requests(pool, setting.load * unit, NUM_REQUESTS, seed)
    batcher = PaperBatcher(
        estimated_hrrn(latency), memory_tokens=setting.memory_tokens, wma_threshold=setting.wma_threshold
    )
    ours: MagnusOutcome = static(batcher, arrivals, latency)
    stalling = Stalling(latency, setting.join_s, setting.padding)
    ccb = continuous(arrivals, stalling, setting.seats, setting.group)
    return {
        "throughput, Magnus / CCB": ours.throughput / ccb.throughput,
        "mean response, CCB / Magnus": ccb.mean_s / ours.mean_s,
    }


_BASE = Ccb()
SETTINGS = {
    AS_IS: _BASE,
    "load 8": replace(_BASE, load=8.0),
    "load 16": replace(_BASE, load=16.0),
    "CCB: 4 places": replace(_BASE, seats=4),
    "CCB: joins once 3 of 7 places are free": replace(_BASE, group=3),
    "CCB: joins once 5 of 7 places are free": replace(_BASE, group=5),
    "CCB: joins once all 7 have ended": replace(_BASE, group=7),
    "CCB: 0.25 s at a join": replace(_BASE, join_s=0.25),
    "CCB: 0.5 s at a join": replace(_BASE, join_s=0.5),
    "CCB: three times the context by padding": replace(_BASE, padding=3.0),
    "outputs twice as long": replace(_BASE, stretch=2.0),
    "outputs four times as long": replace(_BASE, stretch=4.0),
    "Magnus: lengths known": replace(_BASE, error=0.0),
    "Magnus: errors four times as large": replace(_BASE, error=4.0),
    "Magnus: twice the memory": replace(_BASE, memory_tokens=2 * MEMORY_TOKENS),
    "Magnus: Phi of 200,000": replace(_BASE, wma_threshold=200_000.0),
    "steps by the data sheet": replace(_BASE, roofline=True),
    "load 8, outputs four times as long": replace(_BASE, load=8.0, stretch=4.0),
}

MAGNUS_CONDITIONS = conditions(
    "conditions_magnus",
    "Magnus, Figs 10 and 11: what decides between it and CCB",
    SETTINGS,
    magnus_over_ccb,
    {"throughput, Magnus / CCB": 1.0, "mean response, CCB / Magnus": 1.0},
)
