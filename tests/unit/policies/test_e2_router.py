"""E2: the worked examples, its features one by one, and every decision against brute force."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, replace

import numpy as np
import pytest

from core.costs import StepCost
from core.errors import IntegrityError, InvalidValueError
from core.request import Request, SamplingParams
from policies.e2_profiles import (
    INITIAL_TPOT_S,
    LLAMA_3_70B_A100_TP2,
    LLAMA_3_70B_H100_TP2,
    MISTRAL_7B_A6000,
    Regressions,
    from_step_cost,
)
from policies.e2_router import E2Choice, E2Config, E2Router, key_portion
from policies.placement import ReplicaLoad
from policies.radix_tree import Node, Path
from tests.unit.policies.naive_trie import NaiveTrie, path_of

LINEAR = Regressions(lambda new, context: new * 1e-3, lambda output, context: output * 2e-3)
"""The examples' PT of 1 ms a token and DT of 2 ms an output token."""

BARE = E2Config(initial_output_len=0.0, balance=False, rebalance=False, autoscale=False)


def loads_of(names: str) -> tuple[ReplicaLoad, ...]:
    return tuple(ReplicaLoad(name, 0, 0.0) for name in names)


def router_of(
    names: str = "ab",
    block_size: int = 1,
    capacity: int = 10_000,
    config: E2Config = BARE,
    regressions: Regressions = LINEAR,
    ties: np.random.Generator | None = None,
) -> E2Router:
    router = E2Router(regressions, block_size, config, ties)
    for name in names:
        router.replica_up(name, capacity)
    return router


def path(start: int, num: int) -> Path:
    return tuple(range(start, start + num))


class Desk:
    """Gives a router requests under names of its own."""

    def __init__(self, router: E2Router, names: str = "ab") -> None:
        self.router = router
        self.loads = loads_of(names)
        self.num = 0

    def place(self, prefix: Path, names: str = "", now: float = 0.0, prompt_len: int | None = None) -> E2Choice:
        loads = loads_of(names) if names else self.loads
        length = len(prefix) * self.router.block_size if prompt_len is None else prompt_len
        self.num += 1
        choice = self.router.place(f"r{self.num}", prefix, length, loads, now)
        self.router.check_integrity()
        return choice

    def end(self, num: int, output_len: int | None = None, now: float = 0.0) -> None:
        self.router.ended(f"r{num}", output_len, now)
        self.router.check_integrity()


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


BALANCED = replace(BARE, balance=True, initial_output_len=0.0)


def balance_desk(config: E2Config, b_output_len: int) -> Desk:
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
    desk.place(path(0, 100), "b")
    desk.router.evicted("b", path(0, 31))
    desk.router.evicted("unheard of", path(0, 1))
    choice = desk.place(path(0, 100), "b")
    assert (choice.hit_len, choice.reason) == (30, "explore")


def test_a_replica_is_never_believed_to_cache_more_than_it_holds() -> None:
    desk = Desk(router_of("a", capacity=100), "a")
    for i in range(5):
        desk.place(path(1000 * i, 60))
        desk.end(desk.num)
    assert desk.router.tree.num_cached == [100]
    assert desk.place(path(4000, 60)).hit_len == 60
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
    evict_s = desk.router._cost.evict_s
    monkeypatch.setattr(
        type(desk.router._cost), "evict_s", lambda _, slot, query: priced.append(slot) or evict_s(slot, query)
    )
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
        E2Config(**{field: value})  # type: ignore[arg-type]


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


@dataclass
class Past:
    """A request as brute force remembers it."""

    at: float
    path: Path
    prompt_len: int
    replica: int
    prefill_s: float
    end: Node


class BruteForce:
    """Algorithms 1 and 2 from all that ever happened."""

    def __init__(self, regressions: Regressions, config: E2Config, capacity: int, num: int, block_size: int) -> None:
        self.regressions, self.config, self.capacity, self.block_size = regressions, config, capacity, block_size
        self.trie = NaiveTrie(num)
        self.past: deque[Past] = deque()
        self.outputs: list[tuple[float, int, int]] = []
        self.num, self.now = num, 0.0

    def advance(self, now: float) -> None:
        self.now = now
        while self.past and self.past[0].at <= now - self.config.window_s:
            gone = self.past.popleft()
            self.trie.forget(gone.path, gone.replica)

    def parts(self, replica: int) -> tuple[float, float]:
        lens = [
            length for at, where, length in self.outputs if where == replica and at > self.now - self.config.window_s
        ]
        mean = sum(lens) / len(lens) if lens else self.config.initial_output_len
        mine = [past for past in self.past if past.replica == replica]
        decode_s = sum(self.regressions.decode_s(mean, past.prompt_len) for past in mine)
        return sum(past.prefill_s for past in mine), decode_s

    def cost(
        self, replica: int, path: Path, prompt_len: int, nodes: dict[Path, Node]
    ) -> tuple[float, float, float, int]:
        hit = max((i + 1 for i in range(len(path)) if path[: i + 1] in self.trie.cached[replica]), default=0)
        prefill_s = self.regressions.prefill_s(prompt_len - hit * self.block_size, prompt_len)
        short = len(self.trie.cached[replica]) + len(path) - hit - self.capacity
        own = {path[: i + 1] for i in range(len(path))}
        out = [each for each in self.trie.idle[replica] if each not in own][: max(0, short)]
        mine = sum(past.replica == replica for past in self.past)
        evict_s = 0.0
        for node, num in Counter(nodes[position] for position in out).items():
            uses = self.trie.recent[path_of(node), replica]
            pt_s = self.regressions.prefill_s(num * self.block_size, node.end * self.block_size)
            evict_s += pt_s * uses / max(1, mine)
        return sum(self.parts(replica)), evict_s, prefill_s, hit * self.block_size

    def decide(
        self, path_nodes: list[Node], path: Path, prompt_len: int, replicas: list[int], nodes: dict[Path, Node]
    ) -> tuple[str, list[int]]:
        """Why, and which replicas would be right (those of equal cost)."""
        spans, matched = [], 0
        for node in path_nodes:
            if any(path[: node.end] in self.trie.cached[replica] for replica in replicas):
                spans.append((len(node.span), node.end))
                matched = node.end * self.block_size
        loads = {replica: sum(self.parts(replica)) for replica in replicas}
        if prompt_len - matched < matched:
            longest = max(length for length, _ in spans)
            end = next(end for length, end in spans if length == longest)
            holders = [replica for replica in replicas if path[:end] in self.trie.cached[replica]]
            best = self.cheapest(holders, path, prompt_len, nodes)
            lightest = min(replicas, key=lambda i: loads[i])
            if (
                self.config.rebalance
                and sum(past.replica == best[0] for past in self.past) >= self.config.rebalance_after
                and loads[best[0]] > self.config.rebalance_ratio * loads[lightest]
            ):
                return "rebalance", [lightest]
            return "exploit", best
        ratios = {i: self.parts(i)[1] / loads[i] for i in replicas if loads[i] > 0}
        if self.config.balance and ratios:
            heavy = max(ratios, key=lambda i: ratios[i])
            if ratios[heavy] > self.config.imbalance_ratio and min(ratios.values()) < self.config.balanced_ratio:
                return "balance", [heavy]
        return "explore", self.cheapest(replicas, path, prompt_len, nodes)

    def cheapest(self, among: list[int], path: Path, prompt_len: int, nodes: dict[Path, Node]) -> list[int]:
        costs = {replica: sum(self.cost(replica, path, prompt_len, nodes)[:3]) for replica in among}
        return [replica for replica in among if costs[replica] <= min(costs.values()) + 1e-9]


def nodes_of(router: E2Router) -> dict[Path, Node]:
    """By position, the node that it lies in."""
    nodes, stack = {}, [(router.tree.root, ())]
    while stack:
        node, start = stack.pop()
        for child in node.children.values():
            nodes.update({start + child.span[: i + 1]: child for i in range(len(child.span))})
            stack.append((child, start + child.span))
    return nodes


AFFINE = Regressions(
    lambda new, context: 3e-3 + 1e-3 * new + 1e-5 * context, lambda output, context: output * (4e-3 + 1e-5 * context)
)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("config", [BARE, E2Config(rebalance_after=3, autoscale=False)], ids=["bare", "whole"])
def test_every_decision_is_that_of_brute_force(seed: int, config: E2Config) -> None:
    rng = random.Random(seed)
    config = replace(config, window_s=20.0, initial_output_len=rng.choice([0.0, 5.0, 60.0]))
    num, block_size, capacity = 4, 4, rng.choice([8, 14, 30])
    router = E2Router(AFFINE, block_size, config)
    for i in range(num):
        router.replica_up(str(i), capacity * block_size)
    brute = BruteForce(AFFINE, config, capacity, num, block_size)
    in_flight: dict[str, Past] = {}
    now, reasons, evictions = 0.0, set(), 0
    for i in range(150):
        now += rng.choice([0.0, 0.2, 1.0, 3.0])
        brute.advance(now)
        prefix = tuple(rng.choices(range(3), weights=[6, 2, 1], k=rng.randint(0, 9)))
        prompt_len = len(prefix) * block_size + rng.randint(1, 3)
        replicas = sorted(rng.sample(range(num), k=rng.choice([2, 3, 4, 4])))
        router._advance(now)
        path_nodes, nodes = router.tree.insert(prefix), nodes_of(router)
        reason, right = brute.decide(path_nodes, prefix, prompt_len, replicas, nodes)
        expected = {replica: brute.cost(replica, prefix, prompt_len, nodes) for replica in right}
        loads = tuple(ReplicaLoad(str(replica), 0, 0.0) for replica in replicas)
        choice = router.place(f"r{i}", prefix, prompt_len, loads, now)
        router.check_integrity()
        chosen = int(choice.replica)
        assert (choice.reason, chosen in right) == (reason, True)
        told = (choice.load_s, choice.evict_s, choice.prefill_s, choice.hit_len)
        assert told == pytest.approx(expected[chosen], abs=1e-9)
        brute.trie.place(prefix, chosen)
        brute.trie.evict_lru(chosen, max(0, len(brute.trie.cached[chosen]) - capacity))
        end = router._in_flight[f"r{i}"].end
        in_flight[f"r{i}"] = Past(now, prefix, prompt_len, chosen, choice.prefill_s, end)
        brute.past.append(in_flight[f"r{i}"])
        reasons.add(reason)
        evictions += choice.evict_s > 0
        for _ in range(rng.randrange(3)):
            disturb(rng, router, brute, in_flight, now)
            router.check_integrity()
    assert {"exploit", "explore"} <= reasons
    assert evictions > 3 or capacity > 14


def disturb(rng: random.Random, router: E2Router, brute: BruteForce, in_flight: dict[str, Past], now: float) -> None:
    name = rng.choice(sorted(in_flight)) if in_flight else ""
    move = rng.choice(["end", "end", "evicted", "started"])
    if move == "evicted":
        replica, prefix = rng.randrange(4), tuple(rng.choices(range(2), k=rng.randint(1, 5)))
        router.evicted(str(replica), prefix)
        brute.trie.evict(prefix, replica)
    elif name and move == "end":
        past, output_len = in_flight.pop(name), rng.choice([None, 3, 200])
        router.ended(name, output_len, now)
        brute.trie.release(past.path, past.replica)
        if output_len is not None:
            brute.outputs.append((now, past.replica, output_len))
    elif name:
        past = in_flight[name]
        believed, cached = router._in_flight[name].hit_len, 4 * rng.randint(0, len(past.path))
        router.started(name, cached, 0.0, now)
        past.prefill_s = brute.regressions.prefill_s(past.prompt_len - cached, past.prompt_len)
        if cached < believed:
            brute.trie.correct(past.path, past.replica, cached // 4)


def test_a_prompt_after_a_long_context_is_dearer_than_the_same_after_none() -> None:
    cost = StepCost(0.01, 1e-4, 1e-5, 1e-7, prefill_pair_s=1e-8)
    prices = from_step_cost(cost)
    assert prices.prefill_s(100, 100) == cost.prefill_s(100)
    assert prices.prefill_s(100, 5100) - prices.prefill_s(100, 100) == pytest.approx(100 * 5000 * 1e-8)
