"""The prefix tree against a trie of single elements, and its moves one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import IntegrityError
from policies.placement.prefix_tree import Path, PrefixNode, RadixTree
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


def test_an_unmatched_first_element_starts_a_tree_of_its_own() -> None:
    tree = tree_of()
    place(tree, (1, 2))
    place(tree, (3,))
    assert sorted(tree.root.children) == [1, 3]
    assert tree.match_prefix((2,)) == ([], 0)


def test_a_match_ends_within_a_node() -> None:
    tree = tree_of()
    node = place(tree, (1, 2, 3, 4))
    assert tree.match_prefix((1, 2, 3)) == ([], 3), "the path ends"
    assert tree.match_prefix((1, 2, 7, 4)) == ([], 2), "the path leaves"
    assert tree.match_prefix((1, 2, 3, 4, 5)) == ([node], 0), "the tree ends"


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


def test_least_recently_used_leaves_go_first_and_in_part() -> None:
    tree = tree_of()
    old, new = place(tree, (1, 2, 3, 4)), place(tree, (1, 2, 5, 6))
    tree.release(old, 0)
    tree.release(new, 0)
    assert lru_of(tree, 0) == [(1, 2, 3, 4), (1, 2, 3), (1, 2, 5, 6), (1, 2, 5), (1, 2), (1,)]
    tree.evict_lru(0, 3)
    assert lru_of(tree, 0) == [(1, 2, 5), (1, 2), (1,)]
    assert tree.num_cached == [3, 0]


def test_what_is_in_flight_or_to_be_kept_is_not_evicted() -> None:
    tree = tree_of()
    ended, running = place(tree, (1, 2, 3)), place(tree, (1, 4))
    tree.release(ended, 0)
    assert lru_of(tree, 0) == [(1, 2, 3), (1, 2)]
    assert list(tree.lru(0, 5, keep=[ended])) == []
    tree.evict_lru(0, 99)
    assert tree.num_cached[0] == 2
    tree.release(running, 0)
    assert lru_of(tree, 0) == [(1, 4), (1,)]


def test_a_node_goes_when_nobody_caches_it_and_nobody_has_used_it_in_the_window() -> None:
    tree = tree_of()
    end = place(tree, (1, 2))
    tree.release(end, 0)
    tree.evict((1,), 0)
    assert spans(tree, (1, 2)) == [(1, 2)], "still in the window"
    tree.forget(end, 0)
    assert spans(tree, (1, 2)) == []
    end = place(tree, (1, 2))
    tree.release(end, 0)
    tree.forget(end, 0)
    assert spans(tree, (1, 2)) == [(1, 2)], "still cached"
    tree.evict((1,), 0)
    assert known_to(tree) == {}


def test_an_eviction_takes_what_comes_after_it_and_not_what_comes_before() -> None:
    tree = tree_of()
    for path in ((1, 2, 3, 4), (1, 2, 3, 5), (1, 9)):
        tree.release(place(tree, path), 0)
    tree.evict((1, 2, 3), 0)
    assert {position for position, states in known_to(tree).items() if states[0][0]} == {(1,), (1, 2), (1, 9)}
    tree.evict((7, 7), 0)
    tree.evict((1, 2, 3, 4, 5), 0)
    tree.evict((), 0)
    assert tree.num_cached[0] == 3, "what is unknown changes nothing"
    tree.check_integrity()


def test_a_hit_shorter_than_believed_takes_what_hangs_off_the_path_later() -> None:
    tree = tree_of()
    ended = [place(tree, path) for path in ((1, 2, 3, 9, 9), (1, 2, 7), (1, 8))]
    for end in ended:
        tree.release(end, 0)
    place(tree, (1, 2, 3, 6))
    end = place(tree, (1, 2, 3, 4))
    tree.correct(end, 0, 2)
    cached = {position for position, states in known_to(tree).items() if states.get(0, (False,))[0]}
    assert (1, 2, 3, 9) not in cached
    assert {(1, 8), (1, 2, 7), (1, 2, 3, 4), (1, 2, 3, 6)} <= cached, "before the hit's end, own, in flight"
    tree.check_integrity()


def test_a_cleared_replica_has_nothing_and_others_keep_theirs() -> None:
    tree = tree_of()
    place(tree, (1, 2, 3)).assigned = 3
    place(tree, (1, 2, 4), replica=1)
    tree.clear(0)
    tree.check_integrity()
    assert {replica for states in known_to(tree).values() for replica in states} == {1}
    assert tree.num_cached == [0, 3]


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


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)


@settings(max_examples=150, deadline=None)
@given(st.lists(PATHS, min_size=1, max_size=30), st.integers(0, 10**6))
def test_it_is_a_trie_of_single_elements(paths: list[Path], seed: int) -> None:
    rng = random.Random(seed)
    tree, trie = tree_of(3), NaiveTrie(3)
    in_flight: list[tuple[PrefixNode, Path, int]] = []
    recent: list[tuple[PrefixNode, Path, int]] = []
    for path in paths:
        replica = rng.randrange(3)
        assert match_len(tree, path) == max([trie.common_len(path, each) for each in trie.known()], default=0)
        placed = (place(tree, path, replica), path, replica)
        assert path_of(placed[0]) == path
        trie.place(path, replica)
        in_flight.append(placed)
        recent.append(placed)
        for _ in range(rng.randrange(4)):
            disturb(rng, tree, trie, in_flight, recent, rng.choice(paths))
            compare(tree, trie)
            tree.check_counts([(end, at) for end, _, at in in_flight], [(end, at) for end, _, at in recent])
    for end, path, replica in in_flight:
        tree.release(end, replica)
        trie.release(path, replica)
    for end, path, replica in recent:
        tree.forget(end, replica)
        trie.forget(path, replica)
    compare(tree, trie)
    for replica in range(3):
        tree.evict_lru(replica, 10**6)
    assert not tree.root.children, "no replica caches or uses anything"


def disturb(
    rng: random.Random,
    tree: RadixTree,
    trie: NaiveTrie,
    in_flight: list[tuple[PrefixNode, Path, int]],
    recent: list[tuple[PrefixNode, Path, int]],
    path: Path,
) -> None:
    replica, num = rng.randrange(3), rng.randrange(5)
    move = rng.choice(["release", "release", "forget", "evict", "lru", "correct", "clear" if num == 0 else "lru"])
    if move == "release" and in_flight:
        end, held, replica = in_flight.pop(rng.randrange(len(in_flight)))
        tree.release(end, replica)
        trie.release(held, replica)
    elif move == "forget" and recent:
        end, held, replica = recent.pop(rng.randrange(len(recent)))
        tree.forget(end, replica)
        trie.forget(held, replica)
    elif move == "evict":
        tree.evict(path, replica)
        trie.evict(path, replica)
    elif move == "lru":
        tree.evict_lru(replica, num)
        trie.evict_lru(replica, num)
    elif move == "correct" and in_flight:
        end, held, replica = rng.choice(in_flight)
        tree.correct(end, replica, num)
        trie.correct(held, replica, num)
    elif move == "clear":
        tree.clear(replica)
        trie.clear(replica)
        in_flight[:] = [each for each in in_flight if each[2] != replica]
        recent[:] = [each for each in recent if each[2] != replica]


def compare(tree: RadixTree, trie: NaiveTrie) -> None:
    tree.check_integrity()
    assert known_to(tree) == trie.known()
    assert tree.num_cached == [len(cached) for cached in trie.cached]
    assert [lru_of(tree, replica) for replica in range(3)] == trie.idle


def match_len(tree: RadixTree, path: Path) -> int:
    nodes, partial = tree.match_prefix(path)
    return (nodes[-1].end if nodes else 0) + partial


def cached(tree: RadixTree, replica: int = 0) -> set[Path]:
    return {position for position, states in known_to(tree).items() if replica in states and states[replica][0]}


def pending(tree: RadixTree, path: Path, replica: int = 0) -> list[bool]:
    return [bool(node.pending >> replica & 1) for node in tree.match_prefix(path).nodes]


def hold(tree: RadixTree, path: Path, replica: int = 0) -> PrefixNode:
    """As ``place``, on a replica that tells what it caches."""
    nodes = tree.insert(path)
    tree.hold(nodes, replica, pending=True)
    return nodes[-1]


def test_what_is_in_flight_is_pending_until_it_is_stored_and_forgotten_if_it_never_is() -> None:
    tree = tree_of()
    stored, lost = hold(tree, (1, 2, 3)), hold(tree, (1, 2, 4))
    assert pending(tree, (1, 2, 3)) == [True, True]
    tree.store((1, 2, 3), 0)
    assert (pending(tree, (1, 2, 3)), pending(tree, (1, 2, 4))) == ([False, False], [False, True])
    tree.check_integrity()
    tree.release(stored, 0)
    tree.release(lost, 0)
    assert cached(tree) == {(1,), (1, 2), (1, 2, 3)}, "no replica has computed the other one"
    assert lru_of(tree, 0) == [(1, 2, 3), (1, 2), (1,)]


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


def test_everything_is_told_anew_but_what_is_in_flight() -> None:
    tree = tree_of()
    tree.store((1, 2), 0)
    tree.store((3,), 0)
    hold(tree, (1, 2, 9))
    tree.store((1, 2), 1)
    tree.forget_cached(0)
    assert (cached(tree), cached(tree, 1)) == ({(1,), (1, 2), (1, 2, 9)}, {(1,), (1, 2)})
    assert pending(tree, (1, 2, 9)) == [True, True]
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


CHAINED = [(1,), (1, 11), (1, 11, 111), (1, 11, 112), (1, 12), (1, 12, 121), (2,), (2, 21), (2, 21, 211), (2, 22)]
"""Elements that stand for one place each, as chained hashes do."""


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60))
def test_on_replicas_that_tell_what_they_cache_it_is_a_trie_of_single_elements(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    tree, trie = tree_of(3), NaiveTrie(3)
    in_flight: list[tuple[PrefixNode, Path, int]] = []
    recent: list[tuple[PrefixNode, Path, int]] = []
    for _ in range(steps):
        path, replica = rng.choice(CHAINED), rng.randrange(3)
        move = rng.choice(["hold", "hold", "store", "evict", "release", "release", "forget", "anew"])
        if move == "hold":
            end = hold(tree, path, replica)
            trie.place(path, replica, pending=True)
            in_flight.append((end, path, replica))
            recent.append((end, path, replica))
        elif move == "store" and not cuts(tree, path, replica):
            tree.store(path, replica)
            trie.store(path, replica)
        elif move == "evict":
            tree.evict(path, replica)
            trie.evict(path, replica)
        elif move == "anew" and rng.random() < 0.2:
            tree.forget_cached(replica)
            trie.forget_cached(replica)
        elif move == "release" and in_flight:
            end, held, replica = in_flight.pop(rng.randrange(len(in_flight)))
            tree.release(end, replica)
            trie.release(held, replica)
        elif move == "forget" and recent:
            end, held, replica = recent.pop(rng.randrange(len(recent)))
            tree.forget(end, replica)
            trie.forget(held, replica)
        compare_pending(tree, trie)


def cuts(tree: RadixTree, path: Path, replica: int) -> bool:
    """Whether the path ends within a node of the replica, of which the tree takes nothing down then."""
    nodes, partial = tree.match_prefix(path)
    node = nodes[-1] if nodes else tree.root
    return bool(partial) and bool(node.children[path[node.end]].replicas >> replica & 1)


def compare_pending(tree: RadixTree, trie: NaiveTrie) -> None:
    tree.check_integrity()
    assert [cached(tree, replica) for replica in range(3)] == trie.cached
    found: list[set[Path]] = [set(), set(), set()]
    stack: list[PrefixNode] = [tree.root]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        path = path_of(node)
        for replica in range(3):
            if node.pending >> replica & 1:
                found[replica] |= {path[: end + 1] for end in range(node.end - len(node.span), node.end)}
    assert found == trie.pending
