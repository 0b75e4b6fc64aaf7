"""FastServe against MLFQ without skip-join (Figure 10) and without proactive swapping (Figure 11)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lab.reproduce.conditions.table import AS_IS, conditions
from lab.reproduce.fast_serve import a100s
from lab.reproduce.fast_serve_systems import Load, Testbed, serve
from lab.reproduce.rows import near

_BED = a100s("opt-2.7b", batch_size=16)
_LOAD = Load(32.0, 4.0, 0.9, 2048, 20, 400)


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of Figure 10 or 11.

    Attributes:
        quantum: How many times the shortest iteration the first quantum is.
    """

    bed: Testbed = _BED
    load: Load = _LOAD
    quantum: float = 1.0


def _mean_s(point: Point, seed: int, preset: str, mlfq: str = "skip-join") -> float:
    config = replace(point.bed.scheduler, mlfq=mlfq, quantum_s=point.quantum * point.bed.quantum_s)
    done = serve(point.bed, replace(point.load, seed=seed), preset, config).done
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
    return {f"{how} / FastServe": _mean_s(point, seed, f"fastserve-{how}") / ours_s for how in ("defer", "reactive")}


def peak_ratio(load: Load, seed: int) -> dict[str, float]:
    """Returns the most KV tokens of FastServe at once over those of FCFS (section 4.2)."""
    peaks = [serve(_BED, replace(load, seed=seed), preset).usage["0"].peak_tokens for preset in ("fastserve", "fcfs")]
    return {"peak KV, SJ-MLFQ / FCFS": peaks[0] / peaks[1]}


def _memory(share: float) -> Testbed:
    return replace(_BED, kv_tokens=int(_BED.kv_tokens * share))


def _link(share: float, bed: Testbed) -> Testbed:
    gpu = bed.device.gpu
    return replace(bed, device=replace(bed.device, gpu=replace(gpu, host_bandwidth=share * gpu.host_bandwidth)))


_BASE = Point()
SETTINGS = {
    AS_IS: _BASE,
    "rate 64": replace(_BASE, load=replace(_LOAD, rate=64.0)),
    "CV 12": replace(_BASE, load=replace(_LOAD, cv=12.0)),
    "theta 0.4": replace(_BASE, load=replace(_LOAD, theta=0.4)),
    "a first quantum 1/4 as long": replace(_BASE, quantum=0.25),
    "quantum ratio 16": replace(_BASE, bed=replace(_BED, ratio=16.0)),
    "outputs up to 200": replace(_BASE, load=replace(_LOAD, longest_output=200)),
    "batches of 1": replace(_BASE, bed=replace(_BED, batch_size=1)),
    "batches of 64": replace(_BASE, bed=replace(_BED, batch_size=64)),
    "1/8 of the memory": replace(_BASE, bed=_memory(1 / 8)),
}

_TIGHT = Point(_memory(1 / 4), Load(8.0, 4.0, 0.9, 2048, 2048, 200))
SWAP_SETTINGS = {
    AS_IS: _TIGHT,
    "rate 16": replace(_TIGHT, load=replace(_TIGHT.load, rate=16.0)),
    "batches of 64": replace(_TIGHT, bed=replace(_TIGHT.bed, batch_size=64)),
    "1/8 of the link": replace(_TIGHT, bed=_link(1 / 8, _TIGHT.bed)),
    "1/16 of the memory": replace(_TIGHT, bed=_memory(1 / 16)),
}

_FAST = replace(_LOAD, rate=64.0)
PEAK_SETTINGS = {
    AS_IS: _FAST,
    "rate 256": replace(_LOAD, rate=256.0),
    "CV 12": replace(_FAST, cv=12.0),
    "800 requests": replace(_FAST, num_requests=800),
}

FASTSERVE_CONDITIONS = (
    conditions(
        "conditions_fastserve",
        "FastServe, Fig 10: what decides between it and MLFQ",
        SETTINGS,
        mlfq_over_ours,
        {"MLFQ / FastServe": near(24.0, share=0.25), "MLFQ with preemption / FastServe": 1.0},
    ),
    conditions(
        "conditions_fastserve_swapping",
        "FastServe, Fig 11: what decides between it and Defer or Reactive",
        SWAP_SETTINGS,
        swapping_over_ours,
        {"defer / FastServe": near(2.3, share=0.25), "reactive / FastServe": near(1.6, share=0.25)},
    ),
    conditions(
        "conditions_fastserve_peak",
        "FastServe, section 4.2: what decides the peak of KV",
        PEAK_SETTINGS,
        peak_ratio,
        {"peak KV, SJ-MLFQ / FCFS": near(7.0, share=0.25)},
    ),
)
