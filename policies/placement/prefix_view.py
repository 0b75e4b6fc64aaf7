"""The busiest part of a prefix tree, for people to look at."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from farsight.core.messages.placement import PrefixView
from farsight.policies.placement.prefix_tree import PrefixNode, RadixTree


def busiest_prefixes(tree: RadixTree, names: Sequence[str], block_size: int, limit: int) -> tuple[PrefixView, ...]:
    """Returns the ``limit`` nodes that most recent requests go through, each after its parent.

    A node is never busier than its parent, so only children of shown nodes are visited: O(visited nodes).

    Args:
        names: Names of the replicas, by their numbers in the tree.
        block_size: Tokens of an element of a path.
    """
    shown = _busiest(tree.root, limit)
    return tuple(_view(node, depth, names, block_size) for node, depth in _in_order(tree.root, shown))


def _busiest(root: PrefixNode, limit: int) -> set[PrefixNode]:
    shown: set[PrefixNode] = set()
    order = itertools.count()  # breaks ties by order of discovery; nodes themselves cannot be compared
    heap = [(-_num_recent(child), next(order), child) for child in root.children.values()]
    heapq.heapify(heap)
    while heap and len(shown) < limit:
        _, _, node = heapq.heappop(heap)
        shown.add(node)
        for child in node.children.values():
            heapq.heappush(heap, (-_num_recent(child), next(order), child))
    return shown


def _in_order(node: PrefixNode, shown: set[PrefixNode], depth: int = 0) -> Iterator[tuple[PrefixNode, int]]:
    """Yields the shown nodes below ``node`` with their depths, depth first, the busiest child first."""
    for child in sorted(shown.intersection(node.children.values()), key=_num_recent, reverse=True):
        yield child, depth
        yield from _in_order(child, shown, depth + 1)


def _num_recent(node: PrefixNode) -> int:
    return sum(copy.num_recent for copy in node.copies.values())


def _view(node: PrefixNode, depth: int, names: Sequence[str], block_size: int) -> PrefixView:
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
