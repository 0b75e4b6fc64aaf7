"""FastServe (arXiv 2305.05920): Figure 6, the sweeps of section 6, peak memory and scaling.

Unknown in the paper: length bounds, batch sizes, the starvation limit, the number of requests, how Orca reserves
memory, and theta and rate of the panels that sweep something else. Chosen once for Figure 9 and section 6.4, on seed 1,
of about 20 settings: prompts and outputs up to 1024 tokens, theta 1.3, rate 1.5, one sequence a batch and stage, 200
requests. Once for Figures 10 and 11, on one GPU: batches of 16, prompts up to 2048 tokens, theta 0.9, outputs as each
row says. Everywhere: KV in what the model leaves of 90 % of the memory, and no starvation limit; beside each point
FastServe runs once more with the limit of its artifact. A pipeline has a batch of its own in every stage, as live
(ADR 25). Orca reserves prompt and output limit of each request; FasterTransformer pads, and its batches end with their
longest output. In Figure 11 a place for KV holds a whole job, so Defer makes a newcomer wait for room for prompt and
output limit; and steps wait for what Reactive copies, since the paper explains its distance by the overlap.

Rows are means over other seeds than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import StepCost
from farsight.core.forecast import QUANTILES, Forecast
from farsight.policies.compose import build_router, build_scheduler
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.policies.settings import PolicySettings
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import GPUS, MODELS, LinearLatency, Roofline
from farsight.simulator.cluster.records import Recorder
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.traffic.workload import SimRequest
from lab.reproduce.fast_serve_systems import Load, Testbed, serve, serve_batches
from lab.reproduce.rows import (
    ARTIFACT,
    FIXED_QUANTUM,
    Draws,
    Fitted,
    OrderCheck,
    Own,
    Printed,
    Reproduction,
    Row,
    at_most,
    near,
)

HELD_OUT_SEEDS = (2, 3, 4)
DRAWS = Draws(len(HELD_OUT_SEEDS))
_LONGEST = 1024
_LONGEST_PROMPT = 2048  # on one GPU
_FACTOR = "within 25 %; lengths, batch and number of requests chosen by these factors, on seed 1"


def a100s(model: str, num_gpus: int = 1, stages: int = 1, batch_size: int = 1) -> Testbed:
    """A100-40G devices with this model."""
    device = Roofline(GPUS["a100-40g"], MODELS[model], num_gpus // stages, stages)
    kv_bytes = 0.9 * num_gpus * device.gpu.memory_bytes - 2 * device.model.num_params
    kv_tokens = int(kv_bytes / device.model.kv_bytes)
    return Testbed(device, batch_size, kv_tokens, 4 * kv_tokens)


def _load(rate: float = 1.5, cv: float = 4.0, theta: float = 1.3) -> Load:
    return Load(rate, cv, theta, _LONGEST, _LONGEST, 200)


def _load_of_one_gpu(rate: float, longest_output: int, num_requests: int) -> Load:
    return Load(rate, 4.0, 0.9, _LONGEST_PROMPT, longest_output, num_requests)


@dataclass(frozen=True, slots=True)
class JctTimes:
    """Mean and 90th percentile of JCT, in seconds; means over the held-out seeds."""

    mean_s: float
    p90_s: float


def _times(run: Callable[[Load], Recorder], load: Load) -> JctTimes:
    jcts = [[record.jct_s for record in run(replace(load, seed=seed)).done] for seed in HELD_OUT_SEEDS]
    return JctTimes(float(np.mean(jcts)), float(np.mean(np.percentile(jcts, 90, axis=1))))


STARVE_LIMIT_S = 3.0
"""The limit in FastServe's artifact; the paper names none."""


def _promoted(name: str, setting: str, bed: Testbed, load: Load, never: JctTimes) -> Row:
    """FastServe with its starvation limit over FastServe without one."""
    limited = replace(bed, starve_limit_s=STARVE_LIMIT_S)
    ratio = _times(partial(serve, limited, preset="fastserve"), load).mean_s / never.mean_s
    note = "target: costs a quarter at most"
    return Row(name, setting, f"mean JCT, promoted after {STARVE_LIMIT_S:g} s / never", Own(at_most(1.25)), ratio, note)


def least_attained_gain(load: Load) -> float:
    """Mean JCT of FCFS over that of least attained service, one server and a long queue: E[X] / (2 E[min(X, Y)]).

    With two jobs X and Y, FCFS makes one of them wait X or Y; least attained service makes both wait min(X, Y). The
    ratio is below 1 if output lengths are balanced: jobs then end together, and late.
    """
    beyond = np.cumsum(np.arange(1.0, load.longest_output + 1)[::-1] ** -load.theta)[::-1]
    beyond /= beyond[0]
    return float(beyond.sum() / (2 * (beyond**2).sum()))


def fig6_jct_s(preset: str, *, mlfq: str = "skip-join", order: str = "", kv: str = "") -> dict[str, float]:
    """JCT of the three jobs of Figure 6, batch 1: a prompt token or an output token takes one unit of time."""
    latency = LinearLatency(StepCost(0.0, 1.0, 1.0, 0.0), kv_bytes=1)
    forecast = Forecast(2.0, (2.0,) * len(QUANTILES), 1, "given", 0)
    jobs = [SimRequest(f"J{i}", 0.0, prompt, 2, 2, forecast=forecast) for i, prompt in enumerate((5, 1, 2), start=1)]
    config = replace(ARTIFACT, quantum_s=1.0, starve_limit_s=math.inf, mlfq=mlfq, watermark=1.0)
    settings = PolicySettings(config, cost=latency.cost, mlfq=FIXED_QUANTUM)
    limits = SchedulerLimits(1, 0)
    shape = FleetShape(ReplicaShape(1000, 1, 1000, max_num_seqs=1, look_every=1), latency)
    fleet = Fleet(shape, build_router("fcfs"), lambda _: build_scheduler(preset, limits, settings, order=order, kv=kv))
    return {record.arrival.request_id: record.jct_s for record in fleet.run(jobs).done}


def _fig6() -> list[Row]:
    systems = (
        ("FCFS", 25 / 3, fig6_jct_s("fcfs"), ""),
        ("naive MLFQ", 10.0, fig6_jct_s("fastserve", mlfq="no-preemption"), "iterations are not interrupted"),
        ("skip-join MLFQ", 20 / 3, fig6_jct_s("fastserve"), ""),
        ("SRPT", 6.0, fig6_jct_s("fcfs", order="gittins", kv="cheapest-victim"), "the Gittins order with true lengths"),
    )
    rows = []
    for system, reported, jcts, note in systems:
        ours = sum(jcts.values()) / len(jcts)
        note = "; ".join(filter(None, ("exact", note)))
        rows.append(Row("fastserve_fig6", system, "mean JCT", Printed(near(reported, points=1e-9)), ours, note))
    return rows


def _overall(
    name: str, what: str, loads: dict[float, Load], orca: tuple[float, float], ft: tuple[float, float]
) -> list[Row]:
    bed = a100s("gpt-3-175b", 16, 2)
    return _against_baselines(name, {f"{what} {value:g}": (bed, load) for value, load in loads.items()}, orca, ft)


def _against_baselines(
    name: str,
    points: dict[str, tuple[Testbed, Load]],
    orca: tuple[float, float],
    ft: tuple[float, float],
    tails: tuple[tuple[float, float], tuple[float, float]] | None = None,
) -> list[Row]:
    rows: list[Row] = []
    ratios: list[tuple[float, float]] = []
    tail_ratios: list[tuple[float, float]] = []
    for setting, (bed, load) in points.items():
        ours = _times(partial(serve, bed, preset="fastserve"), load)
        first = _times(partial(serve, bed, preset="fcfs", admission="conservative"), load)
        size = max(1, min(bed.batch_size, bed.kv_tokens // (load.longest_prompt + load.longest_output)))
        batches = _times(partial(serve_batches, replace(bed, batch_size=size)), load)
        ratios.append((first.mean_s / ours.mean_s, batches.mean_s / ours.mean_s))
        tail_ratios.append((first.p90_s / ours.p90_s, batches.p90_s / ours.p90_s))
        ordered = OrderCheck(ours.mean_s <= first.mean_s < batches.mean_s, fitted=True, bound=1.0)
        note = "order FastServe <= Orca < FasterTransformer: "
        note += f"{ours.mean_s:.3g}, {first.mean_s:.3g}, {batches.mean_s:.3g} s; "
        note += f"least attained service over FCFS in a long queue: {least_attained_gain(load):.2f}"
        rows.append(Row(name, setting, "mean JCT of Orca / FastServe", ordered, ratios[-1][0], note, DRAWS))
        rows.append(_promoted(name, setting, bed, load, ours))
    rows += _spread(name, "mean JCT", ratios, orca, ft)
    return rows + (_spread(name, "p90 JCT", tail_ratios, *tails) if tails else [])


def _spread(
    name: str, metric: str, ratios: list[tuple[float, float]], orca: tuple[float, float], ft: tuple[float, float]
) -> list[Row]:
    rows = []
    for column, (system, (least, most)) in enumerate((("Orca", orca), ("FasterTransformer", ft))):
        values = [ratio[column] for ratio in ratios]
        for which, reported, ours in (("least", least, min(values)), ("most", most, max(values))):
            rows.append(Row(name, f"{which}, over {system}", metric, _chosen_by(reported), ours, _FACTOR))
    return rows


def _chosen_by(factor: float) -> Fitted:
    """A factor of Figure 9 or section 6.4, by which the settings were chosen."""
    return Fitted(near(factor, share=0.25))


def _load_rows() -> list[Row]:
    loads = {rate: _load(rate) for rate in (0.25, 0.5, 1.0, 1.5, 2.0)}
    return _overall("fastserve_load", "rate", loads, (1.0, 4.3), (1.9, 11.4))


def _cv_rows() -> list[Row]:
    loads = {cv: _load(cv=cv) for cv in (2.0, 4.0, 8.0, 12.0)}
    return _overall("fastserve_cv", "CV", loads, (2.3, 5.1), (7.4, 12.2))


def _zipf_rows() -> list[Row]:
    loads = {theta: _load(theta=theta) for theta in (0.4, 0.9, 1.1, 1.3)}
    return _overall("fastserve_zipf", "theta", loads, (1.9, 3.9), (3.6, 10.6))


def _scaling() -> list[Row]:
    points = {f"{num} GPUs": (a100s("opt-66b", num, 2), _load()) for num in (6, 8, 12, 16)}
    return _against_baselines("fastserve_scaling", points, (3.5, 4.0), (9.2, 11.1), ((2.2, 6.4), (4.3, 12.5)))


_MLFQ = "most, MLFQ variants / FastServe"


@dataclass(frozen=True, slots=True)
class _MlfqPoint:
    """Mean JCT in seconds of FastServe and both baselines of Figure 10, and of the best order known here."""

    ours: JctTimes
    naive_s: float
    cut_off_s: float
    best_s: float


def _mlfq_point(bed: Testbed, load: Load) -> _MlfqPoint:
    def mean_s(preset: str, config: SchedulerConfig | None = None, **parts: Any) -> float:
        return _times(lambda seeded: serve(bed, seeded, preset, config, **parts), load).mean_s

    ours = _times(partial(serve, bed, preset="fastserve"), load)
    naive_s, cut_off_s = (mean_s("fastserve", bed.baseline(kind)) for kind in ("no-preemption", "preemption"))
    known_s = mean_s("fcfs", order="gittins", kv="cheapest-victim")
    return _MlfqPoint(ours, naive_s, cut_off_s, min(ours.mean_s, mean_s("fcfs"), known_s))


def _mlfq_rows(panel: str, points: dict[str, tuple[Testbed, Load]], most: float) -> list[Row]:
    """One panel of Figure 10: MLFQ with and without preemption behind FastServe, and by how much at most.

    The printed factors are of both variants together. MLFQ without preemption does the same work in another order, so
    no order can be ahead of it by more than the best one is. The note of the row of factors tells that bound: MLFQ over
    the best of FastServe, FCFS, and the Gittins order with true lengths. With preemption the work of an iteration that
    is cut off is lost, and there is no such bound.
    """
    name = "fastserve_variants"
    rows, found = [], {setting: _mlfq_point(*at) for setting, at in points.items()}
    for setting, point in found.items():
        ours_s = point.ours.mean_s
        note = "order: skip-join not behind; at most 20 output tokens"
        for metric, there_s in (("MLFQ", point.naive_s), ("MLFQ with preemption", point.cut_off_s)):
            held, factor = OrderCheck(there_s >= ours_s, bound=1.0), there_s / ours_s
            rows.append(Row(name, f"{panel} {setting}", f"{metric} / FastServe", held, factor, note, DRAWS))
        rows.append(_promoted(name, f"{panel} {setting}", *points[setting], point.ours))
    bound = max(point.naive_s / point.best_s for point in found.values())
    alone = max(point.naive_s / point.ours.mean_s for point in found.values())
    cut_off = max(point.cut_off_s / point.ours.mean_s for point in found.values())
    note = f"within 25 %; printed of both variants together; without preemption alone it is {alone:.2f}, and no order"
    note += f" known here is ahead of that one by more than {bound:.2f}"
    factor = max(alone, cut_off)
    rows.append(Row(name, f"{panel} {_MLFQ}", "mean JCT", Printed(near(most, share=0.25)), factor, note))
    return rows + (_ratio_rows(found) if panel == "(d)" else [])


def _ratio_rows(found: dict[str, _MlfqPoint]) -> list[Row]:
    """What the text says of panel (d): a larger ratio helps both baselines, and blocking costs more than lost work."""
    name = "fastserve_variants"
    low, *_, high = found
    rows = []
    for metric, first_s, last_s in (
        ("MLFQ", found[low].naive_s, found[high].naive_s),
        ("MLFQ with preemption", found[low].cut_off_s, found[high].cut_off_s),
    ):
        held, note = OrderCheck(last_s < first_s, bound=1.0), "order: below 1"
        rows.append(Row(name, f"(d) {high} / {low}", f"mean JCT, {metric}", held, last_s / first_s, note, DRAWS))
    for setting, point in found.items():
        ratio, note = point.naive_s / point.cut_off_s, "order: blocking costs more than work that is done again"
        held = OrderCheck(ratio > 1, bound=1.0)
        rows.append(Row(name, f"(d) {setting}", "MLFQ without / with preemption", held, ratio, note, DRAWS))
    return rows


def _variants() -> tuple[Callable[[], list[Row]], ...]:
    """Figure 10, a cell for each panel."""
    bed = a100s("opt-2.7b", batch_size=16)
    load = _load_of_one_gpu(32.0, 20, 400)
    rates = {f"rate {rate:g}": (bed, _load_of_one_gpu(rate, 20, 400)) for rate in (16.0, 32.0, 64.0)}
    cvs = {f"CV {cv:g}": (bed, replace(load, cv=cv)) for cv in (2.0, 4.0, 8.0, 12.0)}
    thetas = {f"theta {theta:g}": (bed, replace(load, theta=theta)) for theta in (0.4, 0.9, 1.1, 1.3)}
    ratios = {f"quantum ratio {ratio:g}": (replace(bed, ratio=ratio), load) for ratio in (2.0, 4.0, 8.0, 16.0)}
    panels = (("(a)", rates, 24.0), ("(b)", cvs, 7.8), ("(c)", thetas, 32.0), ("(d)", ratios, 41.0))
    return tuple(partial(_mlfq_rows, *panel) for panel in panels)


def _kv() -> list[Row]:
    """Section 4.2."""
    name, model = "fastserve_kv", MODELS["gpt-3-175b"]
    gib = model.kv_bytes * 513 / 2**30
    note = "to the decimal given (2.3 GB, which is right in GiB): 512 prompt tokens and one more"
    rows = [Row(name, "GPT-3 175B, one job", "KV, GiB", Printed(near(2.3, points=0.05)), gib, note)]
    bed = a100s("opt-2.7b", batch_size=16)
    ratio = _peak_tokens(bed, "fastserve") / _peak_tokens(bed, "fcfs")
    note = "within 25 %; rate 64, CV 4, at most 20 output tokens"
    return [*rows, Row(name, "peak KV, SJ-MLFQ / FCFS", "tokens", Printed(near(7.0, share=0.25)), ratio, note)]


def _swaps() -> tuple[Callable[[], list[Row]], ...]:
    """Figure 11, a cell for each panel."""
    bed = a100s("opt-2.7b", batch_size=16)
    tight, load = replace(bed, kv_tokens=bed.kv_tokens // 4), _load_of_one_gpu(8.0, 2048, 200)
    rates = {f"rate {rate:g}, a quarter of the memory": (tight, replace(load, rate=rate)) for rate in (4.0, 8.0, 16.0)}
    cvs = {f"CV {cv:g}": (tight, replace(load, cv=cv)) for cv in (2.0, 4.0, 8.0, 12.0)}
    thetas = {f"theta {theta:g}": (tight, replace(load, theta=theta)) for theta in (0.7, 0.9, 1.1)}
    shares = {
        f"1/{share} of the memory": (replace(bed, kv_tokens=bed.kv_tokens // share), load) for share in (1, 2, 4, 8)
    }
    panels = (("(a)", rates, 2.3, 1.6), ("(b)", cvs, 3.5, 1.4), ("(c)", thetas, None, None), ("(d)", shares, None, 1.8))
    return tuple(partial(_swap_rows, *panel) for panel in panels)


_WITHOUT: dict[str, dict[str, Any]] = {"defer": {"admission": "conservative"}, "reactive": {"copies_block": True}}
"""How both baselines of Figure 11 are served."""


def _swap_rows(
    panel: str, points: dict[str, tuple[Testbed, Load]], defer: float | None, reactive: float | None
) -> list[Row]:
    """One panel of Figure 11: both ways to go without proactive swapping, over FastServe, and by how much at most."""
    name, rows = "fastserve_kv", []
    ours = {setting: _times(partial(serve, bed, preset="fastserve"), load) for setting, (bed, load) in points.items()}
    for system, most in (("defer", defer), ("reactive", reactive)):
        ratios = []
        for setting, (bed, load) in points.items():
            there = _times(partial(serve, bed, preset=f"fastserve-{system}", **_WITHOUT[system]), load)
            ratios.append(there.mean_s / ours[setting].mean_s)
            held = OrderCheck(ratios[-1] >= 1, bound=1.0)
            note = "order: not ahead of FastServe; outputs up to 2048"
            where = f"{panel} {system}, {setting}"
            rows.append(Row(name, where, "mean JCT / FastServe", held, ratios[-1], note, DRAWS))
        if most is not None:
            printed = Printed(near(most, share=0.25))
            rows.append(
                Row(name, f"{panel} {system}, most", "mean JCT / FastServe", printed, max(ratios), "within 25 %")
            )
    return rows + [_promoted(name, f"{panel} {at}", bed, load, ours[at]) for at, (bed, load) in points.items()]


def _peak_tokens(bed: Testbed, preset: str) -> float:
    """Mean over the held-out seeds."""
    loads = [replace(_load_of_one_gpu(64.0, 20, 400), seed=seed) for seed in HELD_OUT_SEEDS]
    return float(np.mean([serve(bed, load, preset).usage["0"].peak_tokens for load in loads]))


FAST_SERVE = (
    Reproduction("fastserve_fig6", "FastServe, Figure 6", (_fig6,)),
    Reproduction("fastserve_load", "FastServe, Figure 9 (a)", (_load_rows,)),
    Reproduction("fastserve_cv", "FastServe, Figure 9 (b)", (_cv_rows,)),
    Reproduction("fastserve_zipf", "FastServe, Figure 9 (c)", (_zipf_rows,)),
    Reproduction("fastserve_variants", "FastServe, Figure 10", _variants()),
    Reproduction("fastserve_kv", "FastServe, sections 4.2 and 6.3, Figure 11", (_kv, *_swaps())),
    Reproduction("fastserve_scaling", "FastServe, section 6.4", (_scaling,)),
)
