"""The tree of prefixes stays within its memory, whatever comes within the window."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from core.config.placement import PlacementConfig
from core.errors import ConfigError
from core.messages.cache import CachedRun, KVCacheEvent
from policies.placement.base import ReplicaLoad
from policies.placement.e2_profiles import from_step_cost
from policies.placement.prefix_loads import PrefixLoads
from policies.placement.prefix_tree import PLACE_BYTES, RadixTree
from simulator.cluster.latency import A100_7B

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


def place(loads: PrefixLoads, number: int, path: tuple[int, ...], *, ends: bool = True) -> int:
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
        place(loads, number, path)
        sizes.append(loads.tree.num_bytes)
        if number % 500 == 0:
            loads.check_integrity()
    loads.check_integrity()
    assert MAX_BYTES / 2 < max(sizes) <= MAX_BYTES, "so many bytes, and so many places at most"
    assert sum(loads.load.num_requests) == 3000, "the load of the window is not that of the tree"
    before_last = 3000 - 2
    assert place(loads, 3000, made[before_last]) == len(made[before_last])


def test_without_the_bound_the_same_requests_take_several_times_as_much() -> None:
    loads = make(max_bytes=1 << 40)
    for number, path in enumerate(paths(0, 3000)):
        place(loads, number, path)
    assert loads.tree.num_bytes > 5 * MAX_BYTES


def test_what_is_used_again_and_again_stays_when_the_rest_goes() -> None:
    loads, made = make(), paths(1, 2000)
    favourite = tuple(range(900_001, 900_031))
    for number, path in enumerate(made):
        place(loads, 2 * number, path)
        if number % 10 == 0:
            hit = place(loads, 20_000 + 2 * number, favourite)
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
        place(loads, number, path, ends=False)
    loads.check_integrity()
    assert loads.tree.num_bytes > 50_000
    for number in range(300):
        loads.ended(f"r{number}", 10, 300.0)
    loads.check_integrity()
    place(loads, 1000, made[0])
    assert loads.tree.num_bytes <= 50_000 + PLACE_BYTES * len(made[0]) * 4


def test_the_window_ends_as_before_after_a_cut() -> None:
    loads = make()
    for number, path in enumerate(paths(4, 1000)):
        place(loads, number, path)
    loads.advance(3e6)
    loads.check_integrity()
    assert sum(loads.load.num_requests) == 0


@pytest.mark.parametrize("own", [1, 5, 60])
def test_the_estimate_is_near_what_is_really_allocated(own: int) -> None:
    made = paths(5, 2000, own)
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


def test_the_setting_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"placement\.max_tree_mib"):
        PlacementConfig(max_tree_mib=0)
