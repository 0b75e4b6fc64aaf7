"""The prefix tree: against a trie of single elements, its moves one by one, and the memory that it stays within."""

from __future__ import annotations

import gc
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.core.errors import IntegrityError
from farsight.core.messages.plans import CachedRun, KVCacheEvent
from farsight.policies.placement.base import ReplicaLoad
from farsight.policies.placement.load_cost import from_step_cost
from farsight.policies.placement.prefix_loads import PrefixLoads
from farsight.policies.placement.prefix_tree import PLACE_BYTES, Path, PrefixNode, RadixTree
from farsight.simulator.cluster.latency import A100_7B
from tests.unit.policies.naive_trie import NaiveTrie, known_to, lru_of, path_of


def tree_of(num_replicas: int = 2) -> RadixTree:
    tree = RadixTree()
    assert [tree.add_replica() for _ in range(num_replicas)] == list(range(num_replicas))
    return tree


def place(tree: RadixTree, path: Path, replica: int = 0) -> PrefixNode:
    nodes = tree.insert(path)
    tree.hold(nodes, replica)
    return nodes[-1]


def spans(tree: RadixTree, path: Path) -> list[Path]:
    return [node.span for node in tree.match_prefix(path).nodes]


def test_a_path_is_one_node_until_another_one_leaves_it() -> None:
    tree = tree_of()
    place(tree, (1, 2, 3, 4))
    assert spans(tree, (1, 2, 3, 4)) == [(1, 2, 3, 4)]
    place(tree, (1, 2, 9), replica=1)
    assert spans(tree, (1, 2, 3, 4)) == [(1, 2), (3, 4)]
    assert spans(tree, (1, 2, 9)) == [(1, 2), (9,)]
    tree.check_integrity()


def test_who_ends_at_a_node_still_does_when_it_is_split() -> None:
    tree = tree_of()
    end = place(tree, (1, 2, 3, 4))
    end.assigned = 2
    upper = place(tree, (1, 2), replica=1)
    assert (end.span, upper.span, end.parent) == ((3, 4), (1, 2), upper)
    assert [(copy.ref_count, copy.num_recent) for copy in upper.copies.values()] == [(1, 1), (1, 1)]
    assert (upper.replicas, end.replicas) == (3, 1)
    assert (upper.assigned, end.assigned) == (2, 2), "what was replicated is so in both parts"
    tree.release(end, 0)
    assert upper.copies[0].ref_count == 0
    tree.check_integrity()


@pytest.mark.parametrize("damage", ["size", "bit", "ring", "span"])
def test_damage_is_found(damage: str) -> None:
    tree = tree_of()
    end = place(tree, (1, 2, 3))
    leaf = place(tree, (1, 2, 3, 4))
    tree.release(leaf, 0)
    if damage == "size":
        tree.num_cached[0] += 1
    elif damage == "bit":
        leaf.replicas |= 2
        end.replicas &= ~1
    elif damage == "ring":
        end.copies[0].ref_count = 0
    else:
        leaf.end += 1
    with pytest.raises(IntegrityError):
        tree.check_integrity()


def test_miscounted_requests_are_found() -> None:
    tree = tree_of()
    end = place(tree, (1, 2))
    tree.check_counts([(end, 0)], [(end, 0)])
    for in_flight, recent in (([], [(end, 0)]), ([(end, 0)], []), ([(end, 0), (end, 1)], [(end, 0)])):
        with pytest.raises(IntegrityError):
            tree.check_counts(in_flight, recent)


def cached(tree: RadixTree, replica: int = 0) -> set[Path]:
    return {position for position, states in known_to(tree).items() if replica in states and states[replica][0]}


def pending(tree: RadixTree, path: Path, replica: int = 0) -> list[bool]:
    return [bool(node.pending >> replica & 1) for node in tree.match_prefix(path).nodes]


def hold(tree: RadixTree, path: Path, replica: int = 0) -> PrefixNode:
    """As ``place``, on a replica that tells what it caches."""
    nodes = tree.insert(path)
    tree.hold(nodes, replica, pending=True)
    return nodes[-1]


def test_half_of_a_path_does_not_split_it() -> None:
    tree = tree_of()
    hold(tree, (1, 2, 3, 4))
    tree.store((1, 2), 0)
    assert (spans(tree, (1, 2, 3, 4)), pending(tree, (1, 2, 3, 4))) == ([(1, 2, 3, 4)], [True])
    tree.store((1, 2, 3, 4), 0)
    assert pending(tree, (1, 2, 3, 4)) == [False]
    tree.store((1, 2), 1)
    assert spans(tree, (1, 2, 3, 4)) == [(1, 2), (3, 4)], "another replica has the half alone"
    tree.check_integrity()


def test_the_stored_half_of_a_path_stays_when_nobody_computes_the_rest() -> None:
    tree = tree_of()
    end = hold(tree, (1, 2, 3, 4))
    tree.store((1, 2, 3), 0)
    other = hold(tree, (1, 2, 8))
    assert (spans(tree, (1, 2, 3, 4)), pending(tree, (1, 2, 3, 4))) == ([(1, 2), (3, 4)], [False, True])
    tree.check_integrity()
    tree.evict((1, 2, 3), 0)
    tree.store((1, 2, 3), 0)
    tree.release(end, 0)
    tree.release(other, 0)
    assert cached(tree) == {(1,), (1, 2), (1, 2, 3)}
    assert lru_of(tree, 0) == [(1, 2, 3), (1, 2), (1,)]
    tree.check_integrity()


def test_what_is_evicted_before_a_request_has_started_is_pending_again() -> None:
    tree = tree_of()
    tree.store((1, 2, 3), 0)
    end = hold(tree, (1, 2, 3))
    tree.evict((1, 2), 0)
    assert (spans(tree, (1, 2, 3)), pending(tree, (1, 2, 3))) == ([(1,), (2, 3)], [False, True])
    hold(tree, (1, 2, 3, 4))
    assert pending(tree, (1, 2, 3, 4)) == [False, True, True], "what follows is not there before it"
    tree.release(end, 0)
    tree.check_integrity()


def test_what_grows_at_its_end_stays_one_node() -> None:
    tree = tree_of()
    tree.store((1, 2), 0)
    for element in (3, 4, 5):
        path = tree.path_to(element - 1)
        assert path is not None
        tree.store((*path, element), 0)
    assert (spans(tree, (1, 2, 3, 4, 5)), tree.num_cached) == ([(1, 2, 3, 4, 5)], [5, 0])
    tree.store((1, 2, 3, 4, 5, 6), 1)
    assert spans(tree, (1, 2, 3, 4, 5, 6)) == [(1, 2, 3, 4, 5), (6,)], "the first replica does not have the rest"
    held = hold(tree, (1, 2, 3, 4, 5, 6), replica=1)
    tree.store((1, 2, 3, 4, 5, 6, 7), 1)
    assert held.span == (6,), "a request ends there"
    tree.check_integrity()


def test_elements_are_found_wherever_they_are_moved_to() -> None:
    tree = tree_of()
    end = place(tree, (1, 2, 3, 4))
    place(tree, (1, 2, 7), replica=1)
    assert [tree.path_to(element) for element in (2, 4, 7, 8)] == [(1, 2), (1, 2, 3, 4), (1, 2, 7), None]
    assert [tree.caches(element, 0) for element in (2, 4, 7, 8)] == [True, True, False, False]
    tree.release(end, 0)
    tree.forget(end, 0)
    tree.evict((1, 2, 3), 0)
    assert (tree.path_to(3), tree.path_to(2)) == (None, (1, 2))


Held = tuple[PrefixNode, Path, int]


class Twins:
    """The tree and a trie of single elements over three replicas, told the same."""

    def __init__(self, seed: int) -> None:
        self.rng, self.tree, self.trie = random.Random(seed), tree_of(3), NaiveTrie(3)
        self.in_flight: list[Held] = []
        self.recent: list[Held] = []

    def place(self, path: Path, replica: int, *, pending: bool) -> None:
        nodes = self.tree.insert(path)
        self.tree.hold(nodes, replica, pending=pending)
        self.trie.place(path, replica, pending=pending)
        assert path_of(nodes[-1]) == path
        self.in_flight.append((nodes[-1], path, replica))
        self.recent.append(self.in_flight[-1])

    def move(self, move: str, path: Path) -> None:
        replica, num = self.rng.randrange(3), self.rng.randrange(5)
        known = self.recent if move == "forget" else self.in_flight
        if move in ("release", "forget", "correct"):
            if known:
                end, held, replica = self.rng.choice(known)
                rest = (num,) if move == "correct" else ()
                getattr(self.tree, move)(end, replica, *rest)
                getattr(self.trie, move)(held, replica, *rest)
                if not rest:
                    known.remove((end, held, replica))
        elif move != "store" or not self.cuts(path, replica):
            arguments = {"evict_lru": (replica, num), "clear": (replica,), "forget_cached": (replica,)}
            for each in (self.tree, self.trie):
                getattr(each, move)(*arguments.get(move, (path, replica)))
            if move == "clear":
                for held_by in (self.in_flight, self.recent):
                    held_by[:] = [each for each in held_by if each[2] != replica]

    def cuts(self, path: Path, replica: int) -> bool:
        """Whether the path ends within a node of the replica, of which the tree takes nothing down then."""
        nodes, partial = self.tree.match_prefix(path)
        node = nodes[-1] if nodes else self.tree.root
        return bool(partial) and bool(node.children[path[node.end]].replicas >> replica & 1)

    def compare(self) -> None:
        self.tree.check_integrity()
        self.tree.check_counts(*([(end, at) for end, _, at in held] for held in (self.in_flight, self.recent)))
        assert known_to(self.tree) == self.trie.known()
        assert self.tree.num_cached == [len(cached) for cached in self.trie.cached]
        found: list[set[Path]] = [set(), set(), set()]
        stack: list[PrefixNode] = [self.tree.root]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            path = path_of(node)
            for replica in range(3):
                if node.pending >> replica & 1:
                    found[replica] |= {path[: end + 1] for end in range(node.end - len(node.span), node.end)}
        assert found == self.trie.pending


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)


@settings(max_examples=100)
@given(st.lists(PATHS, min_size=1, max_size=30), st.integers(0, 10**6))
def test_it_is_a_trie_of_single_elements(paths: list[Path], seed: int) -> None:
    twins = Twins(seed)
    rng, tree, trie = twins.rng, twins.tree, twins.trie
    moves = ["release", "release", "forget", "evict", "evict_lru", "correct"] * 5 + ["clear"]
    for path in paths:
        nodes, partial = tree.match_prefix(path)
        matched = (nodes[-1].end if nodes else 0) + partial
        assert matched == max([trie.common_len(path, each) for each in trie.known()], default=0)
        twins.place(path, rng.randrange(3), pending=False)
        for _ in range(rng.randrange(4)):
            twins.move(rng.choice(moves), rng.choice(paths))
            twins.compare()
            assert [lru_of(tree, replica) for replica in range(3)] == trie.idle
    for move, held in (("release", twins.in_flight), ("forget", twins.recent)):
        while held:
            twins.move(move, ())
    tree.evict((), 0)
    twins.compare()
    for replica in range(3):
        tree.evict_lru(replica, 10**6)
    assert not tree.root.children, "no replica caches or uses anything"


CHAINED = [(1,), (1, 11), (1, 11, 111), (1, 11, 112), (1, 12), (1, 12, 121), (2,), (2, 21), (2, 21, 211), (2, 22)]
"""Elements that stand for one place each, as chained hashes do."""


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60))
def test_on_replicas_that_tell_what_they_cache_it_is_a_trie_of_single_elements(seed: int, steps: int) -> None:
    twins = Twins(seed)
    rng = twins.rng
    moves = ["hold"] * 10 + ["store", "evict", "release", "release", "forget"] * 5 + ["forget_cached"]
    for _ in range(steps):
        move, path = rng.choice(moves), rng.choice(CHAINED)
        if move == "hold":
            twins.place(path, rng.randrange(3), pending=True)
        else:
            twins.move(move, path)
        twins.compare()


MAX_BYTES = 1 << 20
LOADS = tuple(ReplicaLoad(name, 0, 0.0) for name in "ab")


def make(capacity: int = 2_000, max_bytes: int = MAX_BYTES) -> PrefixLoads:
    loads = PrefixLoads(from_step_cost(A100_7B.cost), 1, 1e6, 100.0, max_tree_bytes=max_bytes)
    for load in LOADS:
        loads.replica_up(load.name, capacity)
    return loads


def paths(seed: int, num: int, own: int = 20) -> list[tuple[int, ...]]:
    """Prompts of a few families, each with blocks of its own at the end."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(num):
        family = int(rng.integers(8))
        shared = tuple(range(family * 100 + 1, family * 100 + int(rng.integers(2, 30))))
        made.append(shared + tuple(int(each) for each in rng.integers(1 << 40, 1 << 62, own)))
    return made


def request_of(loads: PrefixLoads, number: int, path: tuple[int, ...], *, ends: bool = True) -> int:
    """One request; how much of its path was known to be cached."""
    name, now = f"r{number}", float(number)
    query = loads.match(name, path, len(path) + 1, LOADS, now)
    slot = number % 2
    hit = query.hit_end(slot)
    loads.enter(name, query, slot, now)
    if ends:
        loads.ended(name, 10, now)
    return hit


def test_a_window_of_many_requests_is_bounded_and_the_latest_are_found_again() -> None:
    loads, made = make(), paths(0, 3000)
    sizes = []
    for number, path in enumerate(made):
        request_of(loads, number, path)
        sizes.append(loads.tree.num_bytes)
        if number % 500 == 0:
            loads.check_integrity()
    loads.check_integrity()
    assert MAX_BYTES / 2 < max(sizes) <= MAX_BYTES, "so many bytes, and so many places at most"
    assert PLACE_BYTES * len({element for path in made for element in path}) > 5 * MAX_BYTES, "or nothing was tried"
    assert sum(loads.load.num_requests) == 3000, "the load of the window is not that of the tree"
    before_last = 3000 - 2
    assert request_of(loads, 3000, made[before_last]) == len(made[before_last])
    loads.advance(3e6)
    loads.check_integrity()
    assert sum(loads.load.num_requests) == 0, "the window ends as ever"


def test_what_is_used_again_and_again_stays_when_the_rest_goes() -> None:
    loads, made = make(), paths(1, 2000)
    favourite = tuple(range(900_001, 900_031))
    for number, path in enumerate(made):
        request_of(loads, 2 * number, path)
        if number % 10 == 0:
            hit = request_of(loads, 20_000 + 2 * number, favourite)
            assert hit == (30 if number else 0)


def test_caches_larger_than_the_bound_are_known_in_part() -> None:
    """Each replica tells of far more than the tree may hold."""
    loads = make(capacity=100_000)
    rng = np.random.default_rng(2)
    seq = 0
    for name in "ab":
        loads.noticed(name, KVCacheEvent(1, True, ()))
        for seq in range(2, 500):
            run = CachedRun(0, tuple(int(each) for each in rng.integers(1, 1 << 62, 40)))
            loads.noticed(name, KVCacheEvent(seq, False, (run,), ()))
            assert loads.tree.num_bytes <= MAX_BYTES
        assert loads.tree.caches(run.hashes[-1], loads.slots.find(name) or 0), "the latest is known"
    loads.check_integrity()
    # The replica may tell of what is not known any more: that it has gone, or that more follows it.
    loads.noticed("a", KVCacheEvent(seq + 1, False, (CachedRun(5, (6, 7)),), (11, 12)))
    loads.check_integrity()


def test_what_is_in_flight_is_kept_whatever_it_takes() -> None:
    loads, made = make(max_bytes=50_000), paths(3, 300)
    for number, path in enumerate(made):
        request_of(loads, number, path, ends=False)
    loads.check_integrity()
    assert loads.tree.num_bytes > 50_000
    for number in range(300):
        loads.ended(f"r{number}", 10, 300.0)
    loads.check_integrity()
    request_of(loads, 1000, made[0])
    assert loads.tree.num_bytes <= 50_000 + PLACE_BYTES * len(made[0]) * 4


@pytest.mark.parametrize("own", [1, 5, 60])
def test_the_estimate_is_near_what_is_really_allocated(own: int) -> None:
    made = paths(5, 1000, own)
    gc.collect()
    tracemalloc.start()
    tree = RadixTree()
    replica = tree.add_replica()
    for path in [tuple(int(str(each)) for each in path) for path in made]:
        tree.hold(tree.insert(path), replica)
    del path
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.6 <= tree.num_bytes / allocated <= 1.6
