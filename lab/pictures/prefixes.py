"""Pictures of prefixes: one decision of E2, and the prefix tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from farsight.core.config.scheduling import PlacementConfig
from farsight.core.costs import StepCost
from farsight.policies.placement.base import ReplicaLoad
from farsight.policies.placement.e2 import E2Choice, E2Router
from farsight.policies.placement.load_cost import from_step_cost
from farsight.policies.placement.prefix_tree import PrefixNode, RadixTree

BLOCK = 64
TIMES = from_step_cost(StepCost(base_s=5e-3, prefill_token_s=1e-4, decode_seq_s=1e-4, context_token_s=2e-8))
NAMES = tuple("ABCD")
LOADS = tuple(ReplicaLoad(name, 0, 0.0) for name in NAMES)
CONFIG = PlacementConfig(window_s=20.0)


def draw_e2_router() -> Figure:
    """Draws one decision of E2 in its parts, and what sticking to the cache does to the loads."""
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


COLOURS = ("#4c78a8", "#f58518")
HEIGHT = 0.54
SYSTEM, TOOLS, CHAT = tuple(range(4)), tuple(range(10, 18)), tuple(range(20, 23))


def draw_radix_tree() -> Figure:
    """Draws a prefix tree after a few requests, and after one more and an eviction."""
    tree = RadixTree()
    tree.add_replica()
    tree.add_replica()
    ends = []
    for tail, replica in ((SYSTEM + TOOLS + (30, 31), 0), (SYSTEM + TOOLS + (40, 41, 42), 0), (SYSTEM + CHAT, 1)):
        nodes = tree.insert(tail)
        tree.hold(nodes, replica)
        ends.append((nodes[-1], replica))
    figure = Figure(figsize=(8.4, 4.6))
    above, below = figure.subplots(2, 1, sharex=True)
    _draw(above, tree, "three requests in flight")
    for end, replica in ends[:2]:
        tree.release(end, replica)
    nodes = tree.insert(SYSTEM + TOOLS[:5] + (50, 51, 52, 53))
    tree.hold(nodes, 1)
    tree.evict_lru(0, 4)
    _draw(below, tree, "a request on replica 1 splits the tools; replica 0's requests end, and it evicts 4 blocks")
    below.set_xlabel("depth in the prompt, blocks")
    handles = [Patch(color=colour, label=f"cached on replica {i}") for i, colour in enumerate(COLOURS)]
    handles.append(Patch(facecolor="none", edgecolor="#999999", label="cached nowhere, used within H"))
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


def _draw(axes: Axes, tree: RadixTree, title: str) -> None:
    for node, row in _rows(tree.root):
        start, num = node.end - len(node.span), len(node.span)
        holders = [i for i in range(2) if node.replicas >> i & 1]
        axes.add_patch(Rectangle((start, row - HEIGHT / 2), num, HEIGHT, facecolor="none", edgecolor="#999999"))
        for i, holder in enumerate(holders):
            height = HEIGHT / len(holders)
            bottom = row + HEIGHT / 2 - height * (i + 1)
            axes.add_patch(Rectangle((start, bottom), num, height, color=COLOURS[holder], alpha=0.45, linewidth=0))
        refs = "+".join(str(copy.ref_count) for _, copy in sorted(node.copies.items()) if copy.ref_count)
        label = f"in flight: {refs}" if refs else "unused" if holders else "gone"
        axes.text(start + num / 2, row, label, ha="center", va="center", fontsize=8)
    axes.set(xlim=(-0.2, 15.2), ylim=(2.6, -0.6), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.set_title(title, loc="left", fontsize=9)


def _rows(root: PrefixNode) -> Iterator[tuple[PrefixNode, float]]:
    """Each node and its row: leaves one below the other, a parent in the middle of its children."""
    rows: dict[PrefixNode, float] = {}
    num_leaves = 0

    def place(node: PrefixNode) -> float:
        nonlocal num_leaves
        if node.children:
            below = [place(child) for child in node.children.values()]
            rows[node] = (below[0] + below[-1]) / 2
        else:
            rows[node] = num_leaves
            num_leaves += 1
        return rows[node]

    place(root)
    return ((node, row * 2 / max(1, num_leaves - 1)) for node, row in rows.items() if node is not root)
