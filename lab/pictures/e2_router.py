"""One decision of E2 in its parts, and what sticking to the cache does to the loads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from core.config.scheduling import PlacementConfig
from core.costs import StepCost
from policies.placement.base import ReplicaLoad
from policies.placement.e2 import E2Choice, E2Router
from policies.placement.e2_profiles import from_step_cost

BLOCK = 64
TIMES = from_step_cost(StepCost(base_s=5e-3, prefill_token_s=1e-4, decode_seq_s=1e-4, context_token_s=2e-8))
NAMES = tuple("ABCD")
LOADS = tuple(ReplicaLoad(name, 0, 0.0) for name in NAMES)
CONFIG = PlacementConfig(window_s=20.0)


def draw() -> Figure:
    """The same requests twice: with the features that balance load, and without them."""
    figure = Figure(figsize=(8.4, 3.4))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    _draw_costs(left)
    _draw_shares(right)
    figure.tight_layout()
    return figure


def _draw_costs(axes: Axes) -> None:
    """What the same new prompt would cost on each replica, each asked alone."""
    parts = np.array([[choice.load_s, choice.evict_s, choice.prefill_s] for choice in map(_priced, NAMES)])
    bottom = np.zeros(len(NAMES))
    labels = ("L: placed within H", "M: evicted for it", "P: its own prefill")
    for part, label, colour in zip(parts.T, labels, ("#4c78a8", "#e45756", "#f2cf5b"), strict=True):
        axes.bar(NAMES, part, bottom=bottom, color=colour, label=label, width=0.6)
        bottom += part
    best = int(bottom.argmin())
    axes.annotate("chosen", (best, bottom[best]), xytext=(0, 4), textcoords="offset points", ha="center")
    axes.set(xlabel="replica", ylabel="cost, GPU-seconds", ylim=(0, bottom.max() * 1.5))
    axes.set_title("one prompt to explore", loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _priced(name: str) -> E2Choice:
    router = E2Router(TIMES, BLOCK, replace(CONFIG, balance=False))
    for each, capacity in zip(NAMES, (250, 250, 70, 250), strict=True):
        router.replica_up(each, capacity * BLOCK)
    history = (("A", (40, 50)), ("B", (60,)), ("C", (30, 30)), ("D", (45, 30)))
    for i, (where, lens) in enumerate(history):
        for j, num in enumerate(lens):
            key = f"{where}{j}"
            router.place(
                key, tuple(range(1000 * i + 100 * j, 1000 * i + 100 * j + num)), num * BLOCK, _only(where), 0.0
            )
            router.ended(key, 60 + 40 * (where == "B"), 0.0)
    shared = tuple(range(0, 15)) + tuple(range(9000, 9025))
    return router.place("new", shared, len(shared) * BLOCK, _only(name), 1.0)


def _only(name: str) -> tuple[ReplicaLoad, ...]:
    return tuple(load for load in LOADS if load.name == name)


def _draw_shares(axes: Axes) -> None:
    for config, label, colour in (
        (CONFIG, "with load shift", "#4c78a8"),
        (replace(CONFIG, rebalance=False), "without", "#e45756"),
    ):
        at, ratios, hits = _run(config)
        axes.plot(at, ratios, color=colour, label=f"{label}: {hits:.0%} of prompt tokens cached")
    axes.axhline(CONFIG.rebalance_ratio, color="#999999", linewidth=0.8, linestyle="--")
    axes.text(60, CONFIG.rebalance_ratio, "T_hbal", va="bottom", ha="right", fontsize=8, color="#666666")
    axes.set(xlabel="time, s", ylabel="heaviest load / lightest load", ylim=(0.9, None))
    axes.set_title("ten prefixes, one of them ever more popular", loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _run(config: PlacementConfig) -> tuple[list[float], list[float], float]:
    """Times, ratios of loads, and the share of prompt tokens that hit."""
    rng = np.random.default_rng(5)
    router = E2Router(TIMES, BLOCK, config)
    for name in NAMES:
        router.replica_up(name, 200_000)
    at, ratios, hit, total = [], [], 0, 0
    for i in range(1500):
        now = i * 0.04
        popular = rng.random() < min(0.6, now / 60)
        prefix = 0 if popular else int(rng.integers(1, 10))
        path = (*range(100 * prefix, 100 * prefix + 40), 10_000 + 2 * i, 10_001 + 2 * i)
        choice = router.place(str(i), path, len(path) * BLOCK, LOADS, now)
        router.started(str(i), choice.hit_len, 0.1, now)
        router.ended(str(i), 40, now)
        hit, total = hit + choice.hit_len, total + len(path) * BLOCK
        if i > 250 and i % 15 == 0:
            loads = router.load.prefill_s + router.load.decode_s
            at.append(now)
            ratios.append(float(loads.max() / loads.min()))
    return at, ratios, hit / total
