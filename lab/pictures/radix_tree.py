"""A prefix tree after a few requests, and after one more and an eviction."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from policies.placement.prefix_tree import PrefixNode, RadixTree

COLOURS = ("#4c78a8", "#f58518")
HEIGHT = 0.54
SYSTEM, TOOLS, CHAT = tuple(range(4)), tuple(range(10, 18)), tuple(range(20, 23))


def draw() -> Figure:
    """Bars are nodes; their length is in blocks, their colours are the replicas that cache them."""
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
