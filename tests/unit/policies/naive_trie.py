"""What the radix tree does, element by element and without any cleverness."""

from __future__ import annotations

from collections import Counter

from farsight.policies.placement.prefix_tree import Path, PrefixNode, RadixTree

Position = Path
"""A prefix that ends there."""


def prefixes(path: Path) -> list[Position]:
    return [path[: i + 1] for i in range(len(path))]


class NaiveTrie:
    def __init__(self, num_replicas: int) -> None:
        self.cached: list[set[Position]] = [set() for _ in range(num_replicas)]
        self.pending: list[set[Position]] = [set() for _ in range(num_replicas)]
        self.idle: list[list[Position]] = [[] for _ in range(num_replicas)]  # oldest first
        self.refs: Counter[tuple[Position, int]] = Counter()
        self.recent: Counter[tuple[Position, int]] = Counter()

    def place(self, path: Path, replica: int, *, pending: bool = False) -> None:
        for position in prefixes(path):
            pending = pending or position in self.pending[replica]
            if pending and position not in self.cached[replica]:
                self.pending[replica].add(position)
            self.cached[replica].add(position)
            self.refs[position, replica] += 1
            self.recent[position, replica] += 1
            if position in self.idle[replica]:
                self.idle[replica].remove(position)

    def release(self, path: Path, replica: int) -> None:
        for position in reversed(prefixes(path)):
            self.refs[position, replica] -= 1
            if not self.refs[position, replica] and position in self.pending[replica]:
                self.uncache(replica, {position})
            elif not self.refs[position, replica] and position in self.cached[replica]:
                self.idle[replica].append(position)

    def forget(self, path: Path, replica: int) -> None:
        for position in prefixes(path):
            self.recent[position, replica] -= 1

    def uncache(self, replica: int, gone: set[Position]) -> None:
        self.cached[replica] -= gone
        self.pending[replica] -= gone
        self.idle[replica] = [position for position in self.idle[replica] if position not in gone]

    def evict(self, path: Path, replica: int) -> None:
        gone = {each for each in self.cached[replica] if each[: len(path)] == path}
        held = {each for each in gone if self.refs[each, replica]}
        self.uncache(replica, gone - held)
        self.pending[replica] |= held

    def store(self, path: Path, replica: int) -> None:
        for position in reversed(prefixes(path)):
            self.cached[replica].add(position)
            self.pending[replica].discard(position)
            if position in self.idle[replica]:
                self.idle[replica].remove(position)
            if not self.refs[position, replica]:
                self.idle[replica].append(position)

    def forget_cached(self, replica: int) -> None:
        held = {each for each in self.cached[replica] if self.refs[each, replica]}
        self.uncache(replica, self.cached[replica] - held)
        self.pending[replica] |= held

    def evict_lru(self, replica: int, num: int) -> None:
        self.uncache(replica, set(self.idle[replica][:num]))

    def correct(self, path: Path, replica: int, hit_len: int) -> None:
        gone = set()
        for position in self.cached[replica]:
            common = self.common_len(position, path)
            branch = position[: common + 1]
            if hit_len < common < len(position) and not self.refs[branch, replica]:
                gone.add(position)
        self.uncache(replica, gone)

    def clear(self, replica: int) -> None:
        self.cached[replica], self.pending[replica], self.idle[replica] = set(), set(), []
        for counts in (self.refs, self.recent):
            for key in [key for key in counts if key[1] == replica]:
                del counts[key]

    def known(self) -> dict[Position, dict[int, tuple[bool, int, int]]]:
        """{position: {replica: (cached, in flight, in the window)}}"""
        positions = {position for cached in self.cached for position in cached}
        positions |= {position for counts in (self.refs, self.recent) for (position, _), num in counts.items() if num}
        known = {}
        for position in positions:
            states = {
                replica: (position in cached, self.refs[position, replica], self.recent[position, replica])
                for replica, cached in enumerate(self.cached)
            }
            known[position] = {replica: state for replica, state in states.items() if any(state)}
        return known

    @staticmethod
    def common_len(one: Path, other: Path) -> int:
        return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def known_to(tree: RadixTree) -> dict[Position, dict[int, tuple[bool, int, int]]]:
    """The same of a radix tree."""
    known = {}
    stack: list[tuple[PrefixNode, Path]] = [(tree.root, ())]
    while stack:
        node, path = stack.pop()
        for child in node.children.values():
            states = {
                replica: (bool(child.replicas >> replica & 1), copy.ref_count, copy.num_recent)
                for replica, copy in child.copies.items()
            }
            known.update({path + child.span[: i + 1]: states for i in range(len(child.span))})
            stack.append((child, path + child.span))
    return known


def path_of(node: PrefixNode) -> Path:
    return (path_of(node.parent) if node.parent else ()) + node.span


def lru_of(tree: RadixTree, replica: int) -> list[Position]:
    """The elements that no request in flight holds, oldest first."""
    order = []
    for copy, num in tree.lru(replica, 10**9):
        path = path_of(copy.node)
        order += [path[: len(path) - i] for i in range(num)]
    return order
