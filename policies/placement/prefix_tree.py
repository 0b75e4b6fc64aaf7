"""The global prefix tree of Preble (section 4.2): which replica caches which prefix, and how often it was used lately.

A radix tree over paths of ints, here chained hashes of token blocks; lengths are counted in path elements. A chained
hash occurs at one place in the tree, so KV cache events find their node by it. The tree is a hint: replicas know the
truth, and their reports correct it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from farsight.core.errors import IntegrityError

Path = tuple[int, ...]

PLACE_BYTES, NODE_BYTES, COPY_BYTES = 110, 500, 130
"""Estimated bytes of an element (an int, its place in a span, its entry in the table of places), of a ``PrefixNode``
with its two tables, and of a ``Copy``; CPython 3.11 on 64 bits."""


class PrefixNode:
    """A run of elements that every path so far goes through as a whole or not at all.

    Attributes:
        span: Its elements; empty only at the root.
        end: Elements from the root to the end of the span.
        replicas: Bit mask of the replicas that cache the whole span, and so everything before it, or that will once
            their requests in flight have run; bit i stands for replica i.
        pending: Bit mask of the replicas in ``replicas`` that do not cache the whole span yet.
        assigned: Bit mask of further replicas that may serve the prefix without having cached it (prefix autoscaling).
        copies: The state of the node on each replica, by the replica's number.
    """

    __slots__ = ("assigned", "children", "copies", "end", "parent", "pending", "replicas", "span")

    def __init__(self, span: Path, parent: PrefixNode | None) -> None:
        self.span = span
        self.parent = parent
        self.end: int = len(span) + (parent.end if parent else 0)
        self.children: dict[int, PrefixNode] = {}
        self.replicas = 0
        self.pending = 0
        self.assigned = 0
        self.copies: dict[int, Copy] = {}


class Copy:
    """One node on one replica.

    Copies that are cached and that no request in flight uses form a ring by last access; ``older`` and ``newer`` are
    None outside of it.

    Attributes:
        ref_count: Requests in flight on the replica that go through the node.
        num_recent: Requests placed on the replica within the window that go through the node.
        stored: Leading elements of a pending node that the replica has reported as cached.
    """

    __slots__ = ("newer", "node", "num_recent", "older", "ref_count", "stored")

    def __init__(self, node: PrefixNode, ref_count: int = 0, num_recent: int = 0) -> None:
        self.node = node
        self.ref_count = ref_count
        self.num_recent = num_recent
        self.stored = 0
        self.older: Copy | None = None
        self.newer: Copy | None = None


class Match(NamedTuple):
    """The nodes that a path goes through in full, and how many elements it shares with the one after them."""

    nodes: list[PrefixNode]
    partial: int


class RadixTree:
    """Longest-prefix tree that knows, for each node and replica, what is cached, in flight and recently used.

    A request keeps a reference to its last node only: however nodes are split later, its path leads from there to the
    root. While a request is in flight, its path is outside the last-access order of its replica; when it ends, the path
    is inserted again, deepest node first. So children are always older than their parents, and eviction takes leaves
    first.
    """

    def __init__(self) -> None:
        self.root = PrefixNode((), None)
        self._places: dict[int, PrefixNode] = {}  # by element
        self._oldest: list[Copy] = []  # by replica: the ring's sentinel, whose ``newer`` is the oldest copy
        self.num_cached: list[int] = []  # by replica: elements
        self._num_nodes = self._num_copies = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the tree, estimated from ``PLACE_BYTES``, ``NODE_BYTES`` and ``COPY_BYTES``. O(1)."""
        return PLACE_BYTES * len(self._places) + NODE_BYTES * self._num_nodes + COPY_BYTES * self._num_copies

    def add_replica(self) -> int:
        """Adds a replica with an empty cache and returns its number."""
        ring = Copy(self.root)
        ring.older = ring.newer = ring
        self._oldest.append(ring)
        self.num_cached.append(0)
        return len(self.num_cached) - 1

    def match_prefix(self, path: Path) -> Match:
        """Finds the longest prefix of ``path`` in the tree, on any replica. O(its length)."""
        nodes: list[PrefixNode] = []
        node = self.root
        while node.end < len(path):
            child = node.children.get(path[node.end])
            if child is None:
                break
            if path[node.end : child.end] != child.span:
                return Match(nodes, _common_len(path, node.end, child.span))
            nodes.append(child)
            node = child
        return Match(nodes, 0)

    def insert(self, path: Path) -> list[PrefixNode]:
        """Returns the nodes of exactly this path, from the root on; splits and adds nodes as needed.

        A new node belongs to no replica: call ``hold`` before anything else. O(length).
        """
        nodes, partial = self.match_prefix(path)
        node = nodes[-1] if nodes else self.root
        if partial:
            node = self._split(node.children[path[node.end]], partial)
            nodes.append(node)
        if node.end < len(path):
            leaf = node.children[path[node.end]] = PrefixNode(path[node.end :], node)
            self._num_nodes += 1
            self._places.update(dict.fromkeys(leaf.span, leaf))
            nodes.append(leaf)
        return nodes

    def path_to(self, element: int) -> Path | None:
        """Returns the path that ends with this element; None if the element is not in the tree. O(length)."""
        node: PrefixNode | None = self._places.get(element)
        if node is None:
            return None
        parts = [node.span[: node.span.index(element) + 1]]
        while (node := node.parent) is not None:
            parts.append(node.span)
        return tuple(itertools.chain.from_iterable(reversed(parts)))

    def caches(self, element: int, replica: int) -> bool:
        """Returns whether the replica is believed to cache the element, now or after its requests in flight. O(1)."""
        node = self._places.get(element)
        return node is not None and bool(node.replicas >> replica & 1)

    def hold(self, nodes: Sequence[PrefixNode], replica: int, *, pending: bool = False) -> None:
        """Records a request with this path on the replica, which caches the whole path from now on. O(nodes).

        Args:
            pending: Mark the nodes that are not cached yet as pending until ``store`` confirms them. They are forgotten
                if all requests in flight that go through them end before that.
        """
        bit = 1 << replica
        for node in nodes:
            copy = node.copies.get(replica)
            if copy is None:
                copy = node.copies[replica] = Copy(node)
                self._num_copies += 1
            elif copy.newer is not None:
                _unlink(copy)
            pending = pending or bool(node.pending & bit)  # a node cannot be cached before its parent is
            if not node.replicas & bit:
                node.replicas |= bit
                node.pending |= bit if pending else 0
                self.num_cached[replica] += len(node.span)
            copy.ref_count += 1
            copy.num_recent += 1

    def release(self, end: PrefixNode, replica: int) -> None:
        """Ends a request in flight whose path ends at ``end``: the last access of its path. O(nodes)."""
        node: PrefixNode | None = end
        while node is not None and node is not self.root:
            parent, copy = node.parent, node.copies[replica]
            copy.ref_count -= 1
            if copy.ref_count == 0:
                if node.pending >> replica & 1:
                    self._give_up(copy, replica)
                elif node.replicas >> replica & 1:
                    _link_after(copy, _older(self._oldest[replica]))
                else:
                    self._drop_if_unused(copy, replica)
            node = parent

    def forget(self, end: PrefixNode, replica: int) -> None:
        """Removes a request whose path ends at ``end`` from the window. O(nodes)."""
        node: PrefixNode | None = end
        while node is not None and node is not self.root:
            parent, copy = node.parent, node.copies[replica]
            copy.num_recent -= 1
            if copy.num_recent == 0:
                self._drop_if_unused(copy, replica)
            node = parent

    def lru(self, replica: int, num: int, keep: Collection[PrefixNode] = ()) -> Iterator[tuple[Copy, int]]:
        """Yields what the replica would evict to free ``num`` elements: (copy, elements from its end), oldest first.

        Args:
            keep: Nodes that are about to be used and are not evicted.
        """
        ring = self._oldest[replica]
        copy = _newer(ring)
        while num > 0 and copy is not ring:
            if copy.node not in keep:
                taken = min(num, len(copy.node.span))
                num -= taken
                yield copy, taken
            copy = _newer(copy)

    def evict_lru(self, replica: int, num: int) -> None:
        """Evicts ``num`` elements that no request in flight on the replica uses, the least recently used first."""
        for copy, taken in list(self.lru(replica, num)):
            node = copy.node
            if taken < len(node.span):
                self._split(node, len(node.span) - taken)
            self._uncache(node, replica)

    def store(self, path: Path, replica: int) -> None:
        """Records that the replica caches all of this path, which was just used there. O(length).

        A pending node of which only the first part is cached is not split while requests in flight compute the rest.
        """
        bit = 1 << replica
        nodes, partial = self.match_prefix(path)
        parent = nodes[-1] if nodes else self.root
        child = parent.children[path[parent.end]] if partial else parent
        if partial and child.replicas & bit and parent.end + partial == len(path):
            if child.pending & bit:
                child.copies[replica].stored = max(child.copies[replica].stored, partial)
        else:
            nodes = self._extend(nodes, path, replica) or self.insert(path)
        for node in reversed(nodes):
            copy = node.copies.get(replica)
            if copy is None:
                copy = node.copies[replica] = Copy(node)
                self._num_copies += 1
            elif copy.newer is not None:
                _unlink(copy)
            if not node.replicas & bit:
                node.replicas |= bit
                self.num_cached[replica] += len(node.span)
            node.pending &= ~bit
            copy.stored = 0
            if not copy.ref_count:
                _link_after(copy, _older(self._oldest[replica]))

    def _extend(self, nodes: list[PrefixNode], path: Path, replica: int) -> list[PrefixNode] | None:
        """Lengthens a leaf that only this replica caches and no recent request uses; None if the path has no such leaf.

        So a growing output does not become a chain of nodes.
        """
        last = nodes[-1] if nodes else self.root
        copy = last.copies.get(replica)
        if copy is None or last.end == len(path) or last.children or len(last.copies) > 1:
            return None
        if copy.ref_count or copy.num_recent or not last.replicas >> replica & 1:
            return None
        new = path[last.end :]
        last.span, last.end = last.span + new, len(path)
        self.num_cached[replica] += len(new)
        self._places.update(dict.fromkeys(new, last))
        return nodes

    def forget_cached(self, replica: int) -> None:
        """Forgets what the replica caches, except that the paths of its requests in flight become pending. O(nodes)."""
        for node in reversed(list(_subtree(self.root, replica))):
            if node.replicas >> replica & 1:
                self._lose(node.copies[replica], replica)

    def evict(self, path: Path, replica: int) -> None:
        """Uncaches the last element of ``path`` and everything after it on the replica; unknown paths are ignored.

        Nodes that its requests in flight go through become pending again. O(length and nodes below).
        """
        if not path:
            return
        nodes, partial = self.match_prefix(path)
        node = nodes[-1] if nodes else self.root
        if partial:
            node = node.children[path[node.end]]
            partial += node.end - len(node.span)
        if (partial or node.end) != len(path):
            return
        before = len(path) - 1 - (node.end - len(node.span))
        if before:
            self._split(node, before)
        self._uncache(node, replica)

    def correct(self, end: PrefixNode, replica: int, hit_len: int) -> None:
        """Corrects the tree after a request in flight found only ``hit_len`` elements of its path cached.

        Branches that leave its path after ``hit_len`` cannot be cached either and are removed, except where other
        requests in flight use them. Its own path stays, since the request computes it now. O(removed nodes and their
        siblings).
        """
        node = end
        while node.parent is not None and node.end > hit_len:
            for child in list(node.children.values()):
                if child.replicas >> replica & 1 and not child.copies[replica].ref_count:
                    self._uncache(child, replica)
            node = node.parent

    def clear(self, replica: int) -> None:
        """Forgets everything about the replica; references to its requests become invalid. O(nodes)."""
        for node in reversed(list(_subtree(self.root))):
            node.assigned &= ~(1 << replica)
            copy = node.copies.get(replica)
            if copy is not None:
                copy.ref_count = copy.num_recent = 0
                if node.replicas >> replica & 1:
                    self._uncache_one(copy, replica)
                else:
                    self._drop_if_unused(copy, replica)

    def _split(self, node: PrefixNode, num: int) -> PrefixNode:
        """Moves the first ``num`` elements into a new parent node; requests that end at ``node`` still end there."""
        parent = node.parent
        assert parent is not None
        upper = PrefixNode(node.span[:num], parent)
        self._num_nodes += 1
        self._num_copies += len(node.copies)
        parent.children[upper.span[0]] = upper
        node.span, node.parent = node.span[num:], upper
        upper.children[node.span[0]] = node
        upper.replicas, upper.pending, upper.assigned = node.replicas, node.pending, node.assigned
        self._places.update(dict.fromkeys(upper.span, upper))
        for replica, copy in node.copies.items():
            twin = upper.copies[replica] = Copy(upper, copy.ref_count, copy.num_recent)
            if copy.newer is not None:
                _link_after(twin, copy)
            twin.stored, copy.stored = min(copy.stored, num), max(copy.stored - num, 0)
            if twin.stored == num:
                upper.pending &= ~(1 << replica)
                twin.stored = 0
        return upper

    def _give_up(self, copy: Copy, replica: int) -> None:
        """Keeps only the cached part of a pending node whose rest no request in flight computes any more."""
        if copy.stored:
            upper = self._split(copy.node, copy.stored)
            _link_after(upper.copies[replica], _older(self._oldest[replica]))
        self._uncache_one(copy, replica)

    def _uncache(self, node: PrefixNode, replica: int) -> None:
        """Marks the node and the nodes below it as no longer cached on the replica."""
        cached = [each for each in _subtree(node, replica) if each.replicas >> replica & 1]
        for each in reversed(cached):
            self._lose(each.copies[replica], replica)

    def _lose(self, copy: Copy, replica: int) -> None:
        if copy.ref_count:
            copy.node.pending |= 1 << replica
            copy.stored = 0
        else:
            self._uncache_one(copy, replica)

    def _uncache_one(self, copy: Copy, replica: int) -> None:
        copy.node.replicas &= ~(1 << replica)
        copy.node.pending &= ~(1 << replica)
        copy.stored = 0
        self.num_cached[replica] -= len(copy.node.span)
        if copy.newer is not None:
            _unlink(copy)
        self._drop_if_unused(copy, replica)

    def _drop_if_unused(self, copy: Copy, replica: int) -> None:
        """Removes a node that no replica caches and no request in the window has used (section 4.2)."""
        node = copy.node
        if copy.ref_count or copy.num_recent or node.replicas >> replica & 1:
            return
        del node.copies[replica]
        self._num_copies -= 1
        if not node.copies and node.parent is not None:
            del node.parent.children[node.span[0]]
            self._num_nodes -= 1
            for element in node.span:
                self._places.pop(element, None)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless spans, counts, bits, sizes and rings agree."""
        nodes = [node for node in _subtree(self.root) if node is not self.root]
        if (len(nodes), sum(len(each.copies) for each in nodes)) != (self._num_nodes, self._num_copies):
            raise IntegrityError("nodes or copies are miscounted")
        num_cached = [0] * len(self.num_cached)
        idle = [0] * len(self.num_cached)
        for element, node in self._places.items():
            if element not in node.span:
                raise IntegrityError(f"{element:x} is not where it is looked for")
        for node in _subtree(self.root):
            for first, child in node.children.items():
                _check_child(node, first, child)
            for replica, copy in node.copies.items():
                cached = bool(node.replicas >> replica & 1)
                num_cached[replica] += cached * len(node.span)
                idle[replica] += copy.newer is not None
                if (copy.newer is not None) != (cached and not copy.ref_count):
                    raise IntegrityError(f"replica {replica}: a copy is wrongly in or out of the last-access order")
                if node.pending >> replica & 1 and not (cached and copy.ref_count):
                    raise IntegrityError(f"replica {replica}: a node is pending that no request in flight computes")
                if copy.stored and not (node.pending >> replica & 1 and copy.stored < len(node.span)):
                    raise IntegrityError(f"replica {replica}: a node that is not pending is stored in part")
        if num_cached != self.num_cached:
            raise IntegrityError(f"{self.num_cached} elements are cached by the counters, {num_cached} by the nodes")
        for replica, size in enumerate(idle):
            self._check_ring(replica, size)

    def check_counts(
        self, in_flight: Iterable[tuple[PrefixNode, int]], recent: Iterable[tuple[PrefixNode, int]]
    ) -> None:
        """Raises IntegrityError unless the reference counts are those of these (last node, replica) pairs."""
        refs, uses = self._paths_through(in_flight), self._paths_through(recent)
        for node in _subtree(self.root):
            for replica, copy in node.copies.items():
                if (copy.ref_count, copy.num_recent) != (refs.pop((node, replica), 0), uses.pop((node, replica), 0)):
                    raise IntegrityError(f"replica {replica}: a node's requests are miscounted")
        if refs or uses:
            raise IntegrityError("a request goes through nodes that the tree does not have")

    def _paths_through(self, ends: Iterable[tuple[PrefixNode, int]]) -> Counter[tuple[PrefixNode, int]]:
        counts: Counter[tuple[PrefixNode, int]] = Counter()
        for end, replica in ends:
            node: PrefixNode | None = end
            while node is not None and node is not self.root:
                counts[node, replica] += 1
                node = node.parent
        return counts

    def _check_ring(self, replica: int, size: int) -> None:
        order = [copy.node for copy, _ in self.lru(replica, sum(self.num_cached) + 1)]
        place = {node: i for i, node in enumerate(order)}
        if len(order) != size:
            raise IntegrityError(
                f"replica {replica}: {len(order)} copies in the last-access order, {size} belong there"
            )
        for node in order:
            if node.parent in place and place[node.parent] < place[node]:
                raise IntegrityError(f"replica {replica}: a node was used longer ago than a node below it")


def _common_len(path: Path, start: int, span: Path) -> int:
    """Counts the leading elements that ``span`` shares with ``path`` from ``start`` on."""
    for num, (mine, other) in enumerate(zip(path[start:], span, strict=False)):
        if mine != other:
            return num
    return min(len(path) - start, len(span))


def _subtree(node: PrefixNode, replica: int | None = None) -> Iterator[PrefixNode]:
    """Yields the node and all below it, parents first; with ``replica``, only nodes that it caches or will cache."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        below = node.children.values()
        stack.extend(below if replica is None else [child for child in below if child.replicas >> replica & 1])


def _newer(copy: Copy) -> Copy:
    assert copy.newer is not None
    return copy.newer


def _older(copy: Copy) -> Copy:
    assert copy.older is not None
    return copy.older


def _link_after(copy: Copy, older: Copy) -> None:
    newer = _newer(older)
    copy.older, copy.newer = older, newer
    older.newer = newer.older = copy


def _unlink(copy: Copy) -> None:
    older, newer = _older(copy), _newer(copy)
    older.newer, newer.older = newer, older
    copy.older = copy.newer = None


def _check_child(node: PrefixNode, first: int, child: PrefixNode) -> None:
    if child.parent is not node or not child.span or child.span[0] != first or child.end != node.end + len(child.span):
        raise IntegrityError(f"a node after {node.end} elements does not fit its parent")
    if not child.copies:
        raise IntegrityError(f"a node after {node.end} elements belongs to no replica")
    if node.parent is None:
        return
    if child.replicas & ~node.replicas:
        raise IntegrityError("a replica caches a node but not what comes before it")
    for replica, copy in child.copies.items():
        above = node.copies.get(replica)
        if above is None or above.ref_count < copy.ref_count or above.num_recent < copy.num_recent:
            raise IntegrityError(f"replica {replica}: more requests go through a node than through its parent")
