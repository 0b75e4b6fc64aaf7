"""E2: what makes a replica dear, what it believes that replicas cache, and load that moves between them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from farsight.core.config.scheduling import PlacementConfig
from farsight.core.costs import StepCost
from farsight.core.errors import IntegrityError, InvalidValueError
from farsight.core.messages.plans import CachedRun, KVCacheEvent
from farsight.core.request import Request, SamplingParams
from farsight.policies.placement.e2 import E2Choice, key_portion
from farsight.policies.placement.load_cost import Regressions, from_step_cost
from tests.unit.policies.e2_driver import BARE, Driver, informed, loads_of, path, router_of


def ex2(names: str) -> E2Choice:
    router = router_of("", block_size=10)
    router.replica_up("a", 190)
    router.replica_up("b", 10_000)
    driver = Driver(router)
    for prefix, where, output_len in ((path(0, 10), "a", 10), (path(100, 5), "a", 10), (path(200, 30), "b", 5)):
        driver.place(prefix, where)
        driver.end(driver.num, output_len)
    return driver.place(path(300, 8), names)


def test_ex2_the_cost_is_load_and_evictions_and_prefill() -> None:
    choice = ex2("ab")
    assert (choice.replica, choice.reason) == ("a", "explore")
    parts = (choice.load_s, choice.evict_s, choice.prefill_s, choice.cost_s)
    assert parts == pytest.approx((0.190, 0.020, 0.080, 0.290))
    dear = ex2("b")
    assert (dear.load_s, dear.evict_s, dear.prefill_s, dear.cost_s) == pytest.approx((0.310, 0.0, 0.080, 0.390))


@pytest.mark.parametrize(
    ("spans", "key"),
    [([50, 30, 200, 20], 2), ([50, 60, 30], 1), ([10, 5, 4], 0), ([50, 50], 0), ([7], 0), ([50, 40, 60], 0)],
)
def test_ex3_the_key_portion_is_the_deepest_node_longer_than_all_before_it(spans: list[int], key: int) -> None:
    assert key_portion(spans) == key


def test_regressions_of_a_step_cost() -> None:
    regressions = from_step_cost(StepCost(1.0, 0.1, 0.01, 0.001))
    assert regressions.prefill_s(20, 999) == pytest.approx(3.0)
    assert regressions.decode_s(10.0, 50.0) == pytest.approx(10 * 0.06), "what the batch shares does not count"
    cost = StepCost(0.01, 1e-4, 1e-5, 1e-7, prefill_pair_s=1e-8)
    prices = from_step_cost(cost)
    assert prices.prefill_s(100, 100) == cost.prefill_s(100)
    assert prices.prefill_s(100, 5100) - prices.prefill_s(100, 100) == pytest.approx(100 * 5000 * 1e-8)


def test_outputs_that_did_not_come_to_their_end_teach_nothing() -> None:
    driver = Driver(router_of(config=replace(BARE, initial_output_len=100.0)))
    driver.place(path(0, 50), "a")
    driver.end(1, None)
    driver.end(1, 7)
    driver.end(99, 7)
    assert driver.router.load.mean_output_len(0) == 100.0


def test_a_replica_gone_leaves_its_place_to_another() -> None:
    driver = Driver(router_of("abc"), "abc")
    driver.place(path(0, 100), "b")
    driver.router.replica_gone("b")
    driver.router.replica_gone("b")
    with pytest.raises(InvalidValueError, match="loads"):
        driver.place(path(0, 100), "b")
    assert driver.place(path(0, 100), "ac").reason == "explore"
    driver.router.replica_up("d", 10_000)
    choice = driver.place(path(500, 9), "acd")
    assert (choice.replica, choice.hit_len, choice.load_s) == ("d", 0, 0.0), "on the place of b, before c"
    assert driver.place(path(700, 9), "d").load_s == pytest.approx(0.009)
    assert len(driver.router.load.num_requests) == 3


def test_replicas_may_come_between_a_placement_and_a_start() -> None:
    driver = Driver(router_of("a", config=replace(BARE, autoscale=True, window_s=100.0)), "a")
    driver.place(path(0, 100), now=0.0)
    for queue_s, now in ((1.0, 10.0), (3.0, 70.0)):
        driver.place((*path(0, 100), int(now) + 500), now=now)
        driver.router.replica_up(f"new at {now}", 1000)
        driver.router.started(f"r{driver.num}", 100, queue_s, now)
    assert driver.place(path(0, 101), now=71.0).replica == "a", "what is new is not open yet"


def test_ties_go_to_the_lowest_replica_or_are_drawn() -> None:
    assert Driver(router_of("abc"), "cba").place(path(0, 10)).replica == "a"
    drawn: Counter[str] = Counter()
    rng = np.random.default_rng(3)
    for _ in range(60):
        drawn[Driver(router_of("abc", ties=rng), "abc").place(path(0, 10)).replica] += 1
    assert min(drawn[name] for name in "abc") >= 10


def test_evictions_are_priced_only_where_they_could_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "abcdefgh"
    driver = Driver(router_of(names, capacity=100), names)
    for i, name in enumerate(names):
        driver.place(path(1000 * i, 20 + 10 * i), name)
        driver.end(driver.num)
    priced: list[int] = []
    evict_s = driver.router.prefixes.cost.evict_s

    def counted(_: object, slot: int, query: Any) -> float:
        priced.append(slot)
        return evict_s(slot, query)

    monkeypatch.setattr(type(driver.router.prefixes.cost), "evict_s", counted)
    assert driver.place(path(9000, 85)).replica == "a"
    assert priced == [0, 0], "85 tokens cost a 5 more, b alone has 10 more; then the chosen one's, to be told"


def test_a_request_is_placed_by_its_known_tokens() -> None:
    router = router_of("a", block_size=2)
    request = Request("r", 0, "i", (1, 2, 3), SamplingParams(9), (4, 5))
    choice = router.choose(request, [11, 12], loads_of("a"), 0.0)
    assert choice.prefill_s == pytest.approx(0.005)
    assert router.tree.num_cached == [2]


def test_a_request_in_flight_is_not_placed_again() -> None:
    router = router_of("a")
    router.place("r", (1,), 1, loads_of("a"), 0.0)
    with pytest.raises(InvalidValueError, match="request_id"):
        router.place("r", (1,), 1, loads_of("a"), 0.0)


@pytest.mark.parametrize("damage", ["load", "outputs", "requests", "refs"])
def test_damage_is_found(damage: str) -> None:
    driver = Driver(router_of())
    driver.place(path(0, 5))
    driver.place(path(0, 6))
    driver.end(1, 3)
    load = driver.router.load
    if damage == "load":
        load.correct(0, 1.0)
    elif damage == "outputs":
        load._output_lens[0] += 1
    elif damage == "requests":
        load.num_requests[0] += 1
    else:
        driver.router.tree.root.children[0].copies[0].ref_count += 1
    with pytest.raises(IntegrityError):
        driver.router.check_integrity()


def test_measured_steps_replace_the_prices() -> None:
    driver = Driver(router_of())
    driver.place(path(1, 100), "a")
    driver.router.priced("a", StepCost(0.0, 4e-3, 1e-3, 0.0))
    driver.router.check_integrity()
    assert driver.router.load.prefill_s[0] == pytest.approx(0.4)
    driver.router.priced("b", StepCost(0.0, 2e-3, 1e-3, 0.0))
    driver.router.priced("unheard of", StepCost(0.0, 9e-3, 1e-3, 0.0))
    assert driver.router.load.prefill_s[0] == pytest.approx(0.3), "of the mean over the replicas"
    assert driver.place(path(500, 10), "b").prefill_s == pytest.approx(0.03)


def test_a_start_after_the_window_leaves_the_load_alone() -> None:
    driver = Driver(router_of("a", config=replace(BARE, window_s=10.0)), "a")
    driver.place(path(0, 100))
    for name in ("r1", "unknown"):
        driver.router.started(name, 20, 0.0, 11.0)
    driver.router.check_integrity()
    assert driver.router.load.prefill_s[0] == 0.0


def test_notices_of_evictions_are_believed() -> None:
    driver = Driver(router_of())
    driver.place(path(1, 100), "b")
    driver.end(1)
    driver.router.noticed("b", KVCacheEvent(2, False, evicted=(31,)))
    driver.router.noticed("unheard of", KVCacheEvent(2, False, evicted=(1,)))
    choice = driver.place(path(1, 100), "b")
    assert (choice.hit_len, choice.reason) == (30, "explore")


def test_a_replica_is_never_believed_to_cache_more_than_it_holds() -> None:
    driver = Driver(router_of("a", capacity=100), "a")
    for i in range(5):
        driver.place(path(1000 * i, 60))
        driver.end(driver.num)
    assert driver.router.tree.num_cached == [100]
    assert driver.place(path(4000, 60)).hit_len == 59, "the last token is always computed"
    assert driver.place(path(3000, 60)).hit_len == 40, "the oldest lost its end"


def test_a_new_life_of_a_replica_has_nothing() -> None:
    driver = Driver(router_of())
    driver.place(path(0, 100), "a")
    driver.place(path(0, 100), "b")
    driver.router.replica_up("a", 500)
    driver.end(1, 10)
    choice = driver.place((*path(0, 100), 7), "a")
    assert (choice.hit_len, choice.load_s) == (0, 0.0)
    assert driver.place((*path(0, 100), 8), "b").hit_len == 100
    assert driver.place((9,), "a", now=179.0).load_s == pytest.approx(0.101)
    assert driver.place((9,), "a", now=180.0).load_s == pytest.approx(0.001), (
        "of the old life nothing is left to expire"
    )


def test_what_is_in_flight_is_where_the_next_one_goes_but_not_cached_yet() -> None:
    driver = Driver(informed())
    driver.place(path(1, 100), "b")
    second = driver.place(path(1, 100) + path(500, 10))
    assert (second.replica, second.reason, second.hit_len, second.pending_len) == ("b", "exploit", 100, 100)
    driver.router.noticed("b", KVCacheEvent(2, False, (CachedRun(0, path(1, 100)),)))
    third = driver.place(path(1, 100) + path(600, 10))
    assert (third.hit_len, third.pending_len) == (100, 0)


def test_what_was_never_computed_is_forgotten_with_its_request() -> None:
    driver = Driver(informed())
    driver.place(path(1, 100), "b")
    driver.end(1)
    assert (driver.place(path(1, 100)).reason, driver.router.tree.num_cached) == ("explore", [100, 0])


def test_a_start_says_no_more_than_notices_do() -> None:
    """What it found may have been evicted since, as a notice before it has told."""
    driver = Driver(informed())
    driver.place(path(1, 100), "b")
    driver.router.started("r1", 100, 0.0, 0.0)
    driver.router.check_integrity()
    driver.end(1)
    assert driver.place(path(1, 100)).hit_len == 0


def test_a_whole_notice_replaces_what_was_believed() -> None:
    driver = Driver(informed())
    driver.router.noticed("b", KVCacheEvent(2, False, (CachedRun(0, path(1, 60)),)))
    runs = (CachedRun(0, path(1, 20)), CachedRun(20, path(900, 5)), CachedRun(777, (778,)))
    driver.router.noticed("b", KVCacheEvent(9, True, runs))
    driver.router.check_integrity()
    assert driver.router.tree.num_cached == [0, 25], "nothing hangs on what is not there"
    assert driver.place(path(1, 60)).hit_len == 20
    assert driver.place((*path(1, 20), 900, 901)).hit_len == 21


def test_what_those_placed_before_push_out_is_not_expected() -> None:
    driver = Driver(informed("a", capacity=100), "a")
    driver.router.noticed("a", KVCacheEvent(2, False, (CachedRun(0, path(1, 60)),)))
    assert driver.place(path(1, 61)).hit_len == 60
    driver.end(1)
    driver.place(path(500, 70))
    choice = driver.place(path(1, 61))
    assert choice.hit_len == 30, "of 60, 30 make room"


@pytest.mark.parametrize(("light", "reason"), [(150, "rebalance"), (200, "exploit"), (220, "exploit")])
def test_ex4_the_heaviest_replica_is_relieved_beyond_the_ratio(light: int, reason: str) -> None:
    """300 > 1.5 * 150 moves; 300 = 1.5 * 200 does not."""
    seconds = Regressions(lambda new, context: float(new), lambda output, context: output)
    driver = Driver(router_of(config=replace(BARE, rebalance=True, rebalance_after=0), regressions=seconds))
    driver.place(path(0, 300), "a")
    driver.place(path(1000, light), "b")
    assert driver.place((*path(0, 300), 9999)).reason == reason


BALANCED = replace(BARE, balance=True, initial_output_len=0.0)


def balance_driver(config: PlacementConfig, b_output_len: int) -> Driver:
    """a decodes for 90 % of its load, b for what its output gives, c has none."""
    driver = Driver(router_of("abc", config=config), "abc")
    for i, (name, output_len) in enumerate((("a", 450), ("b", b_output_len))):
        driver.place(path(1000 * i, 100), name)
        driver.end(driver.num, output_len)
    return driver


def test_alike_replicas_are_not_balanced_and_those_without_load_do_not_count() -> None:
    assert balance_driver(BALANCED, 50).place(path(9000, 50)).reason == "explore", "0.5 is not below 0.5"
    choice = balance_driver(BALANCED, 49).place(path(9000, 50))
    assert (choice.replica, choice.reason) == ("a", "balance"), "where decoding leaves arithmetic idle"
    off = balance_driver(replace(BALANCED, balance=False), 10).place(path(9000, 50))
    assert (off.replica, off.reason) == ("c", "explore")
    assert balance_driver(replace(BALANCED, imbalance_ratio=0.9), 10).place(path(9000, 50)).reason == "explore"
    assert balance_driver(BALANCED, 10).place(path(9000, 50), "ac").reason == "explore", "b is closed"
    assert Driver(router_of(config=BALANCED)).place(path(0, 9)).reason == "explore", "no load at all"


def test_load_shifts_only_after_enough_requests_and_stops_below_the_ratio() -> None:
    driver = Driver(router_of(config=replace(BARE, rebalance=True, rebalance_after=5)))
    driver.place(path(0, 100), "a")
    driver.place(path(5000, 10), "b")
    reasons = [driver.place((*path(0, 100), 900 + i)).reason for i in range(12)]
    assert reasons[:4] == ["exploit"] * 4
    assert reasons[4] == "rebalance", "a has five requests"
    assert reasons[5:] == ["exploit"] * 7, "b has computed the prefix: no load is 1.5 times the other"
    off = Driver(router_of(config=BARE))
    off.place(path(0, 100), "a")
    off.place(path(5000, 10), "b")
    assert {off.place((*path(0, 100), 900 + i)).replica for i in range(40)} == {"a"}


def test_requests_that_left_the_window_say_nothing_of_a_load() -> None:
    driver = Driver(router_of(config=replace(BARE, rebalance=True, rebalance_after=5, window_s=10.0)))
    for i in range(4):
        driver.place((*path(0, 100), 900 + i), "a", now=0.0)
    reasons = [driver.place((*path(0, 100), 1000 + i), now=10.0 + i).reason for i in range(6)]
    assert reasons == ["exploit"] * 5 + ["rebalance"]


def test_a_prompt_that_all_begin_with_spreads_over_all_replicas() -> None:
    """Two that have it are alike and neither is the heaviest for long: the others must not stay idle."""
    driver = Driver(router_of("abcd", config=replace(BARE, rebalance=True, rebalance_after=5)), "abcd")
    choices = [driver.place((*path(0, 100), *path(1000 * i, 20))) for i in range(1, 101)]
    placed = Counter(choice.replica for choice in choices)
    assert set(placed) == set("abcd")
    assert max(placed.values()) <= 1.5 * min(placed.values())
    assert [choice.reason for choice in choices].count("rebalance") == 3, "each of the others computes it once"


def test_a_prefix_whose_queueing_doubles_gets_the_lightest_replica_too() -> None:
    config = replace(BARE, autoscale=True, window_s=100.0)
    for enabled in (True, False):
        driver = Driver(router_of("abc", config=replace(config, autoscale=enabled)), "abc")
        driver.place(path(0, 100), "a", now=0.0)
        driver.place(path(5000, 20), "b", now=0.0)
        for i, (queue_s, now) in enumerate(((1.0, 10.0), (3.0, 70.0))):
            assert driver.place(path(0, 100) + path(900 + 50 * i, 40), now=now).replica == "a"
            driver.router.started(f"r{driver.num}", 100, queue_s, now)
        choice = driver.place(path(0, 100) + path(700, 50), now=81.0)
        assert (choice.replica, choice.reason) == ("c" if enabled else "a", "exploit"), "c is the lightest"
        assert choice.hit_len == (0 if enabled else 100), "its KV is computed there when first needed"


def test_each_doubling_adds_one_replica_and_is_counted_anew() -> None:
    driver = Driver(router_of("abc", config=replace(BARE, autoscale=True, window_s=100.0)), "abc")
    driver.place(path(0, 100), "a", now=0.0)
    driver.place(path(5000, 20), "b", now=0.0)
    assigned = []
    for queue_s, now in ((1.0, 10.0), (3.0, 70.0), (9.0, 80.0), (40.0, 140.0), (90.0, 150.0), (400.0, 210.0)):
        driver.place(path(0, 100) + path(100 * int(now) + 90_000, 40), "a", now=now)
        name = f"r{driver.num}"
        driver.place(path(10 * int(now) + 9000, 5), "b", now=now)
        driver.place(path(10 * int(now) + 19000, 1), now=now)  # explores among all: c
        driver.router.started(name, 100, queue_s, now)
        driver.router.check_integrity()
        assigned.append(driver.router.tree.root.children[0].assigned)
    assert assigned == [0, 4, 4, 6, 6, 6], "c, then b, then there is none left"


def test_where_all_wait_alike_nothing_is_replicated() -> None:
    """Queueing doubles everywhere as the load rises: one replica more would only cost memory."""
    driver = Driver(router_of("ab", config=replace(BARE, autoscale=True, window_s=100.0)))
    for queue_s, now in ((0.0, 0.0), (1.0, 10.0), (3.0, 70.0)):
        for start, name in ((0, "a"), (5000, "b")):
            prefix = path(start, 100) + path(start + 100 * int(now) + 90_000, 40)
            assert driver.place(prefix, "" if now else name, now=now).replica == name
            driver.router.started(f"r{driver.num}", 100, queue_s, now)
    assert {node.assigned for node in driver.router.tree.root.children.values()} == {0}


def test_a_replica_gone_is_not_given_a_prefix() -> None:
    driver = Driver(router_of("abc", config=replace(BARE, autoscale=True, window_s=100.0)), "abc")
    driver.place(path(0, 100), "a", now=0.0)
    driver.place(path(5000, 20), now=0.0)
    for queue_s, now in ((1.0, 10.0), (3.0, 70.0)):
        driver.place((*path(0, 100), int(now) + 900), now=now)
        if now == 70.0:
            driver.router.replica_gone("c")
        driver.router.started(f"r{driver.num}", 100, queue_s, now)
    assert driver.router.tree.root.children[0].assigned == 2
    driver.router.replica_up("b", 10_000)
    assert driver.router.tree.root.children[0].assigned == 0, "a new life has no prefixes to share"
