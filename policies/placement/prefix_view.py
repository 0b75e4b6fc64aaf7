"""The busiest part of a prefix tree, for people to look at."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from core.messages.placement import PrefixView
from policies.placement.prefix_tree import Node, RadixTree


def busiest_prefixes(tree: RadixTree, names: Sequence[str], block_size: int, limit: int) -> tuple[PrefixView, ...]:
    """The ``limit`` nodes that most requests went through lately, each after the one above it.

    No node is busier than the one above it, so only the children of those shown are looked at: O(those).

    Args:
        names: Of the replicas, by their numbers in the tree.
        block_size: Tokens of an element of a path.
    """
    shown = _busiest(tree.root, limit)
    return tuple(_view(node, depth, names, block_size) for node, depth in _in_order(tree.root, shown))


def _busiest(root: Node, limit: int) -> set[Node]:
    shown: set[Node] = set()
    order = itertools.count()  # of two as busy the one found first; nodes themselves have no order
    heap = [(-_num_recent(child), next(order), child) for child in root.children.values()]
    heapq.heapify(heap)
    while heap and len(shown) < limit:
        _, _, node = heapq.heappop(heap)
        shown.add(node)
        for child in node.children.values():
            heapq.heappush(heap, (-_num_recent(child), next(order), child))
    return shown


def _in_order(node: Node, shown: set[Node], depth: int = 0) -> Iterator[tuple[Node, int]]:
    """Depth first, the busiest child first."""
    for child in sorted(shown.intersection(node.children.values()), key=_num_recent, reverse=True):
        yield child, depth
        yield from _in_order(child, shown, depth + 1)


def _num_recent(node: Node) -> int:
    return sum(copy.num_recent for copy in node.copies.values())


def _view(node: Node, depth: int, names: Sequence[str], block_size: int) -> PrefixView:
    return PrefixView(
        depth=depth,
        num_tokens=len(node.span) * block_size,
        end_len=node.end * block_size,
        num_recent=_num_recent(node),
        num_in_flight=sum(copy.ref_count for copy in node.copies.values()),
        replicas=_named(node.replicas, names),
        assigned=_named(node.assigned & ~node.replicas, names),
    )


def _named(mask: int, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for slot, name in enumerate(names) if mask >> slot & 1)
