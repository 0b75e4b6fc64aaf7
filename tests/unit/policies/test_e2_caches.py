"""E2: what it believes that replicas cache, and what corrects it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.messages.cache import CachedRun, KVCacheEvent
from tests.unit.policies.e2_desk import BARE, Desk, informed, path, router_of


def test_a_start_that_finds_less_corrects_load_and_tree() -> None:
    desk = Desk(router_of("a"), "a")
    desk.place(path(0, 100))
    desk.place(path(0, 100) + path(500, 50))
    desk.end(2)
    desk.place(path(0, 100) + path(600, 10))
    desk.router.started("r3", 40, 0.0, 0.0)
    desk.router.started("unknown", 40, 0.0, 0.0)
    desk.router.check_integrity()
    choice = desk.place(path(0, 100) + path(500, 50))
    assert choice.load_s == pytest.approx(0.100 + 0.050 + 0.070), "r3 computes 70 tokens, not 10"
    assert choice.hit_len == 100, "what hung on the missing part is gone, the path is being computed"


def test_a_start_that_finds_more_corrects_the_load() -> None:
    desk = Desk(router_of("a"), "a")
    desk.place(path(0, 100))
    desk.router.started("r1", 100, 0.0, 0.0)
    assert desk.place(path(500, 10)).load_s == 0.0


def test_a_start_after_the_window_leaves_the_load_alone() -> None:
    desk = Desk(router_of("a", config=replace(BARE, window_s=10.0)), "a")
    desk.place(path(0, 100))
    desk.router.started("r1", 20, 0.0, 11.0)
    desk.router.check_integrity()
    assert desk.router.load.prefill_s[0] == 0.0


def test_notices_of_evictions_are_believed() -> None:
    desk = Desk(router_of())
    desk.place(path(1, 100), "b")
    desk.end(1)
    desk.router.noticed("b", KVCacheEvent(2, False, evicted=(31,)))
    desk.router.noticed("unheard of", KVCacheEvent(2, False, evicted=(1,)))
    choice = desk.place(path(1, 100), "b")
    assert (choice.hit_len, choice.reason) == (30, "explore")


def test_a_replica_is_never_believed_to_cache_more_than_it_holds() -> None:
    desk = Desk(router_of("a", capacity=100), "a")
    for i in range(5):
        desk.place(path(1000 * i, 60))
        desk.end(desk.num)
    assert desk.router.tree.num_cached == [100]
    assert desk.place(path(4000, 60)).hit_len == 59, "the last token is always computed"
    assert desk.place(path(3000, 60)).hit_len == 40, "the oldest lost its end"


def test_a_new_life_of_a_replica_has_nothing() -> None:
    desk = Desk(router_of())
    desk.place(path(0, 100), "a")
    desk.place(path(0, 100), "b")
    desk.router.replica_up("a", 500)
    desk.end(1, 10)
    choice = desk.place((*path(0, 100), 7), "a")
    assert (choice.hit_len, choice.load_s) == (0, 0.0)
    assert desk.place((*path(0, 100), 8), "b").hit_len == 100
    assert desk.place((9,), "a", now=179.0).load_s == pytest.approx(0.101)
    assert desk.place((9,), "a", now=180.0).load_s == pytest.approx(0.001), "of the old life nothing is left to expire"


def test_what_is_in_flight_is_where_the_next_one_goes_but_not_cached_yet() -> None:
    desk = Desk(informed())
    desk.place(path(1, 100), "b")
    second = desk.place(path(1, 100) + path(500, 10))
    assert (second.replica, second.reason, second.hit_len, second.pending_len) == ("b", "exploit", 100, 100)
    desk.router.noticed("b", KVCacheEvent(2, False, (CachedRun(0, path(1, 100)),)))
    third = desk.place(path(1, 100) + path(600, 10))
    assert (third.hit_len, third.pending_len) == (100, 0)


def test_what_was_never_computed_is_forgotten_with_its_request() -> None:
    desk = Desk(informed())
    desk.place(path(1, 100), "b")
    desk.end(1)
    assert (desk.place(path(1, 100)).reason, desk.router.tree.num_cached) == ("explore", [100, 0])


def test_a_start_says_no_more_than_notices_do() -> None:
    """What it found may have been evicted since, as a notice before it has told."""
    desk = Desk(informed())
    desk.place(path(1, 100), "b")
    desk.router.started("r1", 100, 0.0, 0.0)
    desk.router.check_integrity()
    desk.end(1)
    assert desk.place(path(1, 100)).hit_len == 0


def test_a_whole_notice_replaces_what_was_believed() -> None:
    desk = Desk(informed())
    desk.router.noticed("b", KVCacheEvent(2, False, (CachedRun(0, path(1, 60)),)))
    runs = (CachedRun(0, path(1, 20)), CachedRun(20, path(900, 5)), CachedRun(777, (778,)))
    desk.router.noticed("b", KVCacheEvent(9, True, runs))
    desk.router.check_integrity()
    assert desk.router.tree.num_cached == [0, 25], "nothing hangs on what is not there"
    assert desk.place(path(1, 60)).hit_len == 20
    assert desk.place((*path(1, 20), 900, 901)).hit_len == 21


def test_what_those_placed_before_push_out_is_not_expected() -> None:
    desk = Desk(informed("a", capacity=100), "a")
    desk.router.noticed("a", KVCacheEvent(2, False, (CachedRun(0, path(1, 60)),)))
    assert desk.place(path(1, 61)).hit_len == 60
    desk.end(1)
    desk.place(path(500, 70))
    choice = desk.place(path(1, 61))
    assert choice.hit_len == 30, "of 60, 30 make room"
