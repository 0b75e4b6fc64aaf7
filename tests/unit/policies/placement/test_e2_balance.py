"""E2: load that moves between replicas, and prefixes that get more of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from core.config.placement import PlacementConfig
from policies.placement.e2_profiles import Regressions
from tests.unit.policies.e2_desk import BARE, Desk, path, router_of


@pytest.mark.parametrize(("light", "reason"), [(150, "rebalance"), (200, "exploit"), (220, "exploit")])
def test_ex4_the_heaviest_replica_is_relieved_beyond_the_ratio(light: int, reason: str) -> None:
    """300 > 1.5 * 150 moves; 300 = 1.5 * 200 does not."""
    seconds = Regressions(lambda new, context: float(new), lambda output, context: output)
    desk = Desk(router_of(config=replace(BARE, rebalance=True, rebalance_after=0), regressions=seconds))
    desk.place(path(0, 300), "a")
    desk.place(path(1000, light), "b")
    assert desk.place((*path(0, 300), 9999)).reason == reason


def test_ex4_220_against_150_stays() -> None:
    desk = Desk(router_of(config=replace(BARE, rebalance=True, rebalance_after=0)))
    desk.place(path(0, 220), "a")
    desk.place(path(1000, 150), "b")
    assert (choice := desk.place(path(0, 221))).replica == "a"
    assert choice.reason == "exploit"


BALANCED = replace(BARE, balance=True, initial_output_len=0.0)


def balance_desk(config: PlacementConfig, b_output_len: int) -> Desk:
    """a decodes for 90 % of its load, b for what its output gives, c has none."""
    desk = Desk(router_of("abc", config=config), "abc")
    for i, (name, output_len) in enumerate((("a", 450), ("b", b_output_len))):
        desk.place(path(1000 * i, 100), name)
        desk.end(desk.num, output_len)
    return desk


def test_what_is_explored_goes_where_decoding_leaves_arithmetic_idle() -> None:
    choice = balance_desk(BALANCED, 10).place(path(9000, 50))
    assert (choice.replica, choice.reason) == ("a", "balance")
    off = balance_desk(replace(BALANCED, balance=False), 10).place(path(9000, 50))
    assert (off.replica, off.reason) == ("c", "explore")


def test_alike_replicas_are_not_balanced_and_those_without_load_do_not_count() -> None:
    assert balance_desk(BALANCED, 50).place(path(9000, 50)).reason == "explore", "0.5 is not below 0.5"
    assert balance_desk(BALANCED, 49).place(path(9000, 50)).reason == "balance"
    assert balance_desk(replace(BALANCED, imbalance_ratio=0.9), 10).place(path(9000, 50)).reason == "explore"
    assert balance_desk(BALANCED, 10).place(path(9000, 50), "ac").reason == "explore", "b is closed"
    assert Desk(router_of(config=BALANCED)).place(path(0, 9)).reason == "explore", "no load at all"


def test_load_shifts_only_after_enough_requests_and_stops_below_the_ratio() -> None:
    desk = Desk(router_of(config=replace(BARE, rebalance=True, rebalance_after=5)))
    desk.place(path(0, 100), "a")
    desk.place(path(5000, 10), "b")
    reasons = [desk.place((*path(0, 100), 900 + i)).reason for i in range(12)]
    assert reasons[:4] == ["exploit"] * 4
    assert reasons[4] == "rebalance", "a has five requests"
    assert reasons[5:] == ["exploit"] * 7, "b has computed the prefix: no load is 1.5 times the other"
    off = Desk(router_of(config=BARE))
    off.place(path(0, 100), "a")
    off.place(path(5000, 10), "b")
    assert {off.place((*path(0, 100), 900 + i)).replica for i in range(40)} == {"a"}


def test_requests_that_left_the_window_say_nothing_of_a_load() -> None:
    desk = Desk(router_of(config=replace(BARE, rebalance=True, rebalance_after=5, window_s=10.0)))
    for i in range(4):
        desk.place((*path(0, 100), 900 + i), "a", now=0.0)
    reasons = [desk.place((*path(0, 100), 1000 + i), now=10.0 + i).reason for i in range(6)]
    assert reasons == ["exploit"] * 5 + ["rebalance"]


def test_a_prompt_that_all_begin_with_spreads_over_all_replicas() -> None:
    """Two that have it are alike and neither is the heaviest for long: the others must not stay idle."""
    desk = Desk(router_of("abcd", config=replace(BARE, rebalance=True, rebalance_after=5)), "abcd")
    choices = [desk.place((*path(0, 100), *path(1000 * i, 20))) for i in range(1, 101)]
    placed = Counter(choice.replica for choice in choices)
    assert set(placed) == set("abcd")
    assert max(placed.values()) <= 1.5 * min(placed.values())
    assert [choice.reason for choice in choices].count("rebalance") == 3, "each of the others computes it once"


def test_a_prefix_whose_queueing_doubles_gets_the_lightest_replica_too() -> None:
    config = replace(BARE, autoscale=True, window_s=100.0)
    for enabled in (True, False):
        desk = Desk(router_of("abc", config=replace(config, autoscale=enabled)), "abc")
        desk.place(path(0, 100), "a", now=0.0)
        desk.place(path(5000, 20), "b", now=0.0)
        for i, (queue_s, now) in enumerate(((1.0, 10.0), (3.0, 70.0))):
            assert desk.place(path(0, 100) + path(900 + 50 * i, 40), now=now).replica == "a"
            desk.router.started(f"r{desk.num}", 100, queue_s, now)
        choice = desk.place(path(0, 100) + path(700, 50), now=81.0)
        assert (choice.replica, choice.reason) == ("c" if enabled else "a", "exploit"), "c is the lightest"
        assert choice.hit_len == (0 if enabled else 100), "its KV is computed there when first needed"


def test_each_doubling_adds_one_replica_and_is_counted_anew() -> None:
    desk = Desk(router_of("abc", config=replace(BARE, autoscale=True, window_s=100.0)), "abc")
    desk.place(path(0, 100), "a", now=0.0)
    desk.place(path(5000, 20), "b", now=0.0)
    assigned = []
    for queue_s, now in ((1.0, 10.0), (3.0, 70.0), (9.0, 80.0), (40.0, 140.0), (90.0, 150.0), (400.0, 210.0)):
        desk.place(path(0, 100) + path(100 * int(now) + 90_000, 40), "a", now=now)
        name = f"r{desk.num}"
        desk.place(path(10 * int(now) + 9000, 5), "b", now=now)
        desk.place(path(10 * int(now) + 19000, 1), now=now)  # explores among all: c
        desk.router.started(name, 100, queue_s, now)
        desk.router.check_integrity()
        assigned.append(desk.router.tree.root.children[0].assigned)
    assert assigned == [0, 4, 4, 6, 6, 6], "c, then b, then there is none left"


def test_where_all_wait_alike_nothing_is_replicated() -> None:
    """Queueing doubles everywhere as the load rises: one replica more would only cost memory."""
    desk = Desk(router_of("ab", config=replace(BARE, autoscale=True, window_s=100.0)))
    for queue_s, now in ((0.0, 0.0), (1.0, 10.0), (3.0, 70.0)):
        for start, name in ((0, "a"), (5000, "b")):
            prefix = path(start, 100) + path(start + 100 * int(now) + 90_000, 40)
            assert desk.place(prefix, "" if now else name, now=now).replica == name
            desk.router.started(f"r{desk.num}", 100, queue_s, now)
    assert {node.assigned for node in desk.router.tree.root.children.values()} == {0}


def test_a_replica_gone_is_not_given_a_prefix() -> None:
    desk = Desk(router_of("abc", config=replace(BARE, autoscale=True, window_s=100.0)), "abc")
    desk.place(path(0, 100), "a", now=0.0)
    desk.place(path(5000, 20), now=0.0)
    for queue_s, now in ((1.0, 10.0), (3.0, 70.0)):
        desk.place((*path(0, 100), int(now) + 900), now=now)
        if now == 70.0:
            desk.router.replica_gone("c")
        desk.router.started(f"r{desk.num}", 100, queue_s, now)
    assert desk.router.tree.root.children[0].assigned == 2
    desk.router.replica_up("b", 10_000)
    assert desk.router.tree.root.children[0].assigned == 0, "a new life has no prefixes to share"


def test_queueing_that_does_not_double_replicates_nothing() -> None:
    desk = Desk(router_of("ab", config=replace(BARE, autoscale=True, window_s=100.0)))
    desk.place(path(0, 100), "a", now=0.0)
    for i, (queue_s, now) in enumerate(((1.0, 10.0), (1.9, 70.0), (0.0, 80.0), (9.0, 200.0), (9.0, 260.0))):
        desk.place(path(0, 100) + path(900 + 50 * i, 40), now=now)
        desk.router.started(f"r{desk.num}", 100, queue_s, now)
    assert {node.assigned for node in desk.router.tree.match_prefix(path(0, 100)).nodes} == {0}
