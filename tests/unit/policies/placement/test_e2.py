"""E2: the worked examples of costs and choices, and its features one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from core.config.placement import PlacementConfig
from core.costs import StepCost
from core.errors import IntegrityError, InvalidValueError
from core.request import Request, SamplingParams
from policies.placement.e2 import E2Choice, E2Router, key_portion
from policies.placement.e2_profiles import (
    INITIAL_TPOT_S,
    LLAMA_3_70B_A100_TP2,
    LLAMA_3_70B_H100_TP2,
    MISTRAL_7B_A6000,
    Regressions,
    from_step_cost,
)
from tests.unit.policies.e2_desk import BARE, LINEAR, Desk, loads_of, path, router_of


@pytest.mark.parametrize(("matched", "reason"), [(63, "exploit"), (51, "exploit"), (50, "explore"), (49, "explore")])
def test_ex1_who_computes_less_than_is_cached_exploits(matched: int, reason: str) -> None:
    desk = Desk(router_of())
    desk.place(path(0, matched), "b")
    choice = desk.place(path(0, matched) + path(1000, 100 - matched))
    assert choice.reason == reason
    assert choice.replica == ("b" if reason == "exploit" else "a")
    assert choice.hit_len == (matched if reason == "exploit" else 0)


def ex2(names: str) -> E2Choice:
    router = router_of("", block_size=10)
    router.replica_up("a", 190)
    router.replica_up("b", 10_000)
    desk = Desk(router)
    for prefix, where, output_len in ((path(0, 10), "a", 10), (path(100, 5), "a", 10), (path(200, 30), "b", 5)):
        desk.place(prefix, where)
        desk.end(desk.num, output_len)
    return desk.place(path(300, 8), names)


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


@pytest.mark.parametrize(
    ("regressions", "new", "context", "milliseconds"),
    [
        (MISTRAL_7B_A6000, 1000, 1000, 125.506),
        (MISTRAL_7B_A6000, 100, 100, 24.8),
        (MISTRAL_7B_A6000, 4000, 4000, 539.306),
        (LLAMA_3_70B_A100_TP2, 2000, 8000, 466.235),
        (LLAMA_3_70B_H100_TP2, 2000, 8000, 211.818),
    ],
)
def test_pt_of_the_authors(regressions: Regressions, new: int, context: int, milliseconds: float) -> None:
    """To the digits that the constants are known to."""
    assert regressions.prefill_s(new, context) * 1e3 == pytest.approx(milliseconds, abs=8e-3)
    assert regressions.decode_s(10.0, 1e4) == 10 * INITIAL_TPOT_S


def test_pt_of_mistral_between_its_breaks() -> None:
    """Quadratic from 192 to 384 new tokens: (-118 + 375 - 230.4 + 0.32) / 0.9 at 300."""
    assert MISTRAL_7B_A6000.prefill_s(300, 300) * 1e3 == pytest.approx(29.911, abs=1e-3)
    assert MISTRAL_7B_A6000.prefill_s(191, 191) * 1e3 == pytest.approx(24.8)


def test_regressions_of_a_step_cost() -> None:
    regressions = from_step_cost(StepCost(1.0, 0.1, 0.01, 0.001))
    assert regressions.prefill_s(20, 999) == pytest.approx(3.0)
    assert regressions.decode_s(10.0, 50.0) == pytest.approx(10 * 0.06), "what the batch shares does not count"


def test_load_counts_the_window_and_the_outputs_seen_in_it() -> None:
    desk = Desk(router_of(config=replace(BARE, window_s=10.0, initial_output_len=100.0)))
    desk.place(path(0, 50), "a", now=0.0)
    assert desk.place(path(100, 50), "a", now=5.0).load_s == pytest.approx(0.05 + 0.2), "nothing has ended yet"
    desk.end(1, 10, now=6.0)
    assert desk.place(path(200, 50), "a", now=7.0).load_s == pytest.approx(2 * (0.05 + 0.02))
    assert desk.place(path(300, 50), "a", now=10.0).load_s == pytest.approx(2 * (0.05 + 0.02)), "the first has left"
    assert desk.place(path(400, 50), "a", now=16.0).load_s == pytest.approx(2 * (0.05 + 0.2)), "and so has its output"
    assert desk.place(path(500, 50), "a", now=26.0).load_s == 0.0


def test_outputs_that_did_not_come_to_their_end_teach_nothing() -> None:
    desk = Desk(router_of(config=replace(BARE, initial_output_len=100.0)))
    desk.place(path(0, 50), "a")
    desk.end(1, None)
    desk.end(1, 7)
    desk.end(99, 7)
    assert desk.router.load.mean_output_len(0) == 100.0


def test_what_only_replicas_that_are_closed_cache_is_not_cached() -> None:
    desk = Desk(router_of())
    desk.place(path(0, 100), "a")
    choice = desk.place(path(0, 100), "b")
    assert (choice.reason, choice.hit_len) == ("explore", 0)


def test_of_several_holders_the_cheapest_is_exploited() -> None:
    desk = Desk(router_of("abc"), "abc")
    for name in "abc":
        desk.place(path(0, 100), name)
    desk.place(path(500, 30), "a")
    desk.place(path(600, 10), "b")
    desk.place(path(700, 20), "c")
    assert desk.place(path(0, 100)).replica == "b"


def test_candidates_hold_the_longest_node_not_the_whole_match() -> None:
    """(100) is on both, (20) behind it on a alone: b has so much less load that it may compute the 20 again."""
    desk = Desk(router_of())
    desk.place(path(0, 100) + path(500, 20), "a")
    desk.place(path(0, 100), "b")
    desk.place(path(900, 400), "a")
    choice = desk.place(path(0, 100) + path(500, 20))
    assert (choice.reason, choice.replica, choice.hit_len) == ("exploit", "b", 100)


def test_the_prompt_beyond_its_full_blocks_is_always_missed() -> None:
    desk = Desk(router_of(block_size=10))
    desk.place(path(0, 2), "a", prompt_len=29)
    assert desk.place(path(0, 2), prompt_len=39).prefill_s == pytest.approx(0.019)
    assert desk.place((), prompt_len=9).reason == "explore"


def test_a_replica_gone_leaves_its_place_to_another() -> None:
    desk = Desk(router_of("abc"), "abc")
    desk.place(path(0, 100), "b")
    desk.router.replica_gone("b")
    desk.router.replica_gone("b")
    with pytest.raises(InvalidValueError, match="loads"):
        desk.place(path(0, 100), "b")
    assert desk.place(path(0, 100), "ac").reason == "explore"
    desk.router.replica_up("d", 10_000)
    choice = desk.place(path(500, 9), "acd")
    assert (choice.replica, choice.hit_len, choice.load_s) == ("d", 0, 0.0), "on the place of b, before c"
    assert desk.place(path(700, 9), "d").load_s == pytest.approx(0.009)
    assert len(desk.router.load.num_requests) == 3


def test_replicas_may_come_between_a_placement_and_a_start() -> None:
    desk = Desk(router_of("a", config=replace(BARE, autoscale=True, window_s=100.0)), "a")
    desk.place(path(0, 100), now=0.0)
    for queue_s, now in ((1.0, 10.0), (3.0, 70.0)):
        desk.place((*path(0, 100), int(now) + 500), now=now)
        desk.router.replica_up(f"new at {now}", 1000)
        desk.router.started(f"r{desk.num}", 100, queue_s, now)
    assert desk.place(path(0, 101), now=71.0).replica == "a", "what is new is not open yet"


def test_ties_go_to_the_lowest_replica_or_are_drawn() -> None:
    assert Desk(router_of("abc"), "cba").place(path(0, 10)).replica == "a"
    drawn: Counter[str] = Counter()
    rng = np.random.default_rng(3)
    for _ in range(60):
        drawn[Desk(router_of("abc", ties=rng), "abc").place(path(0, 10)).replica] += 1
    assert min(drawn[name] for name in "abc") >= 10


def test_evictions_are_priced_only_where_they_could_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "abcdefgh"
    desk = Desk(router_of(names, capacity=100), names)
    for i, name in enumerate(names):
        desk.place(path(1000 * i, 20 + 10 * i), name)
        desk.end(desk.num)
    priced: list[int] = []
    evict_s = desk.router.prefixes.cost.evict_s

    def counted(_: object, slot: int, query: Any) -> float:
        priced.append(slot)
        return evict_s(slot, query)

    monkeypatch.setattr(type(desk.router.prefixes.cost), "evict_s", counted)
    assert desk.place(path(9000, 85)).replica == "a"
    assert priced == [0, 0], "85 tokens cost a 5 more, b alone has 10 more; then the chosen one's, to be told"


def test_a_request_is_placed_by_its_known_tokens() -> None:
    router = router_of("a", block_size=2)
    request = Request("r", 0, "i", (1, 2, 3), SamplingParams(9), (4, 5))
    choice = router.choose(request, [11, 12], loads_of("a"), 0.0)
    assert choice.prefill_s == pytest.approx(0.005)
    assert router.tree.num_cached == [2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window_s", 0.0),
        ("imbalance_ratio", 0.0),
        ("imbalance_ratio", 1.1),
        ("balanced_ratio", -0.1),
        ("rebalance_ratio", 0.9),
        ("rebalance_after", -1),
        ("initial_output_len", -1.0),
    ],
)
def test_bad_parameters_are_named(field: str, value: float) -> None:
    with pytest.raises(InvalidValueError, match=field):
        PlacementConfig(**{field: value})  # type: ignore[arg-type]


def test_a_request_in_flight_is_not_placed_again() -> None:
    router = router_of("a")
    router.place("r", (1,), 1, loads_of("a"), 0.0)
    with pytest.raises(InvalidValueError, match="request_id"):
        router.place("r", (1,), 1, loads_of("a"), 0.0)


def test_a_block_has_tokens() -> None:
    with pytest.raises(InvalidValueError, match="block_size"):
        E2Router(LINEAR, 0)


@pytest.mark.parametrize("damage", ["load", "outputs", "requests", "refs"])
def test_damage_is_found(damage: str) -> None:
    desk = Desk(router_of())
    desk.place(path(0, 5))
    desk.place(path(0, 6))
    desk.end(1, 3)
    load = desk.router.load
    if damage == "load":
        load.correct(0, 1.0)
    elif damage == "outputs":
        load._output_lens[0] += 1
    elif damage == "requests":
        load.num_requests[0] += 1
    else:
        desk.router.tree.root.children[0].copies[0].ref_count += 1
    with pytest.raises(IntegrityError):
        desk.router.check_integrity()


def test_a_prompt_after_a_long_context_is_dearer_than_the_same_after_none() -> None:
    cost = StepCost(0.01, 1e-4, 1e-5, 1e-7, prefill_pair_s=1e-8)
    prices = from_step_cost(cost)
    assert prices.prefill_s(100, 100) == cost.prefill_s(100)
    assert prices.prefill_s(100, 5100) - prices.prefill_s(100, 100) == pytest.approx(100 * 5000 * 1e-8)


def test_measured_steps_replace_the_prices() -> None:
    desk = Desk(router_of())
    desk.place(path(1, 100), "a")
    desk.router.priced("a", StepCost(0.0, 4e-3, 1e-3, 0.0))
    desk.router.check_integrity()
    assert desk.router.load.prefill_s[0] == pytest.approx(0.4)
    desk.router.priced("b", StepCost(0.0, 2e-3, 1e-3, 0.0))
    desk.router.priced("unheard of", StepCost(0.0, 9e-3, 1e-3, 0.0))
    assert desk.router.load.prefill_s[0] == pytest.approx(0.3), "of the mean over the replicas"
    assert desk.place(path(500, 10), "b").prefill_s == pytest.approx(0.03)
