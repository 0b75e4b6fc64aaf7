"""E2 with forecasts: what makes a replica dearer, one thing at a time, and every decision against brute force."""

from __future__ import annotations

import random

import pytest

from core.costs import StepCost
from core.errors import InvalidValueError
from core.request import Request, SamplingParams
from policies.placement.base import ReplicaLoad
from policies.placement.e2_forecast import INITIAL_OUTPUT_LEN, E2Forecast, ForecastChoice
from policies.placement.prefix_tree import Path
from tests.unit.policies.e2_desk import path
from tests.unit.policies.global_table import forecast
from tests.unit.policies.plain_work import PlainRequest, PlainWork

CAPACITY = 3000
"""The capacity of each replica where brute force decides as well, in tokens."""

COST = StepCost(base_s=0.01, prefill_token_s=1e-3, decode_seq_s=1e-3, context_token_s=1e-6)


class Desk:
    """Places requests, named in order, on replicas that hold ``capacity`` tokens; a block is one token."""

    def __init__(self, names: str = "ab", capacity: int = 100_000, cost: StepCost = COST) -> None:
        self.placement = E2Forecast(cost, block_size=1)
        self.loads = tuple(ReplicaLoad(name, 0, 0.0) for name in names)
        self.num = 0
        for name in names:
            self.placement.replica_up(name, capacity)

    def place(
        self, prefix: Path, mean: float | None = 50.0, now: float = 0.0, only: str = "", most: int = 1000
    ) -> ForecastChoice:
        self.num += 1
        loads = tuple(load for load in self.loads if load.name in only) if only else self.loads
        predicted = None if mean is None else forecast(mean)
        request = Request(f"r{self.num}", 0, "i", (1,) * len(prefix), SamplingParams(most), forecast=predicted)
        choice = self.placement.choose(request, prefix, loads, now)
        self.placement.check_integrity()
        return choice

    def start(self, num: int, now: float = 0.0, cached_len: int = 0) -> None:
        self.placement.started(f"r{num}", cached_len, 0.0, now)
        self.placement.check_integrity()

    def end(self, num: int, now: float = 0.0, output_len: int | None = 50) -> None:
        self.placement.ended(f"r{num}", output_len, now)
        self.placement.check_integrity()


def test_of_two_idle_replicas_the_one_that_caches_the_prefix() -> None:
    desk = Desk()
    desk.place(path(0, 100), only="b")
    desk.start(1)
    desk.end(1)
    choice = desk.place(path(0, 120))
    assert (choice.replica, choice.reason, choice.hit_len) == ("b", "hit", 100)
    assert choice.prefill_s == pytest.approx(COST.prefill_s(20)) and choice.cost_s == choice.prefill_s


def test_a_forecast_that_comes_later_moves_those_that_follow() -> None:
    desk = Desk()
    for num, name in ((1, "a"), (2, "b")):
        desk.place(path(1000 * num, 10), mean=None, only=name)
        desk.start(num)
    assert desk.place(path(5000, 10), mean=900.0).replica == "a"
    desk.end(3)
    desk.placement.foreseen("r1", forecast(800.0), 0.0)
    desk.placement.foreseen("r2", forecast(20.0), 0.0)
    assert desk.place(path(6000, 10), mean=900.0).replica == "b"


def test_without_a_forecast_the_outputs_of_all_replicas_tell() -> None:
    desk = Desk()
    assert desk.place(path(0, 10), mean=None).predicted_len == INITIAL_OUTPUT_LEN
    assert desk.place(path(100, 10), mean=None, most=30).predicted_len == 30
    desk.end(1, output_len=40)
    desk.end(2, output_len=20)
    assert desk.place(path(200, 10), mean=None).predicted_len == 30


def test_a_resumed_request_is_expected_to_make_the_rest() -> None:
    desk = Desk()
    request = Request("r", 1, "i", (1,) * 10, SamplingParams(100), (2,) * 30, forecast=forecast(80.0))
    assert desk.placement.choose(request, path(0, 40), desk.loads, 0.0).predicted_len == 50.0


def test_room_for_a_prompt_is_made_where_it_costs_least() -> None:
    desk = Desk(capacity=100)
    desk.place(path(0, 80), only="a", mean=1.0)
    desk.start(1)
    desk.end(1)
    choice = desk.place(path(1000, 50), mean=1.0, only="a")
    assert choice.evict_s == pytest.approx(COST.prefill_s(30, 50)), "30 of 80 tokens, which one of one request used"
    desk.end(2)
    assert desk.place(path(2000, 50), mean=1.0).replica == "b"


def test_measured_prices_replace_the_prior() -> None:
    desk = Desk()
    slow = StepCost(0.1, 2e-3, 5e-3, 0.0)
    desk.place(path(0, 10), mean=100.0, only="a")
    desk.start(1)
    desk.placement.priced("a", slow)
    desk.placement.check_integrity()
    choice = desk.place(path(1000, 50), mean=100.0, only="a", now=0.0)
    assert choice.prefill_s == pytest.approx(2 * slow.prefill_s(50))
    assert choice.decode_s == pytest.approx(2 * 100 * slow.decode_seq_s)


def test_a_replica_that_comes_again_has_nothing_and_one_that_is_gone_gets_nothing() -> None:
    desk = Desk()
    for _ in range(3):
        desk.place(path(0, 100), only="a", mean=900.0)
    desk.start(1)
    desk.placement.replica_up("a", 100_000)
    desk.placement.check_integrity()
    choice = desk.place(path(0, 100), only="a")
    assert (choice.hit_len, choice.queue_s, choice.decode_s) == (0, 0.0, 0.0)
    desk.end(1)  # of the life before: heard late, and changes nothing
    desk.placement.replica_gone("a")
    desk.placement.replica_gone("nobody")
    desk.placement.check_integrity()
    desk.placement.replica_up("c", 100_000)
    desk.loads = (desk.loads[1], ReplicaLoad("c", 0, 0.0))
    assert {desk.place(path(100 * i, 100)).replica for i in range(4)} == {"b", "c"}


def test_a_block_has_a_token_at_least() -> None:
    with pytest.raises(InvalidValueError, match="block_size"):
        E2Forecast(COST, 0)


def brute_force_cost_s(work: PlainWork, slot: int, prompt_len: int, hit_len: int, length: float) -> float:
    """A request's time on a replica: queue, prefill for all that are there, decode, wait for memory; no eviction."""
    there = work.on(slot)
    cost_s = sum(each.prefill_s for each in there if not each.started)
    cost_s += (1 + len(there)) * COST.prefill_s(prompt_len - hit_len, hit_len)
    for each in there:
        together = min(each.left, length)
        cost_s += together * (COST.decode_seq_s + COST.context_token_s * prompt_len)
        cost_s += together * (COST.decode_seq_s + COST.context_token_s * each.prompt_len)
    return cost_s + work.memory_wait_s(slot, prompt_len - hit_len, length, CAPACITY)


@pytest.mark.parametrize("seed", range(8))
def test_every_decision_is_that_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    desk, work, now = Desk("abc", CAPACITY), PlainWork(COST), 0.0
    cached: dict[str, set[int]] = {name: set() for name in "abc"}
    for _ in range(60):
        now += rng.expovariate(1 / 0.2)
        work.advance(now)
        waiting = [name for name, each in work.requests.items() if not each.started]
        running = [name for name, each in work.requests.items() if each.started]
        action = rng.random()
        if action < 0.3 and waiting:
            name = rng.choice(waiting)
            each = work.requests[name]
            desk.placement.started(name, each.prompt_len - each.own_len, 0.0, now)
            each.started = True
        elif action < 0.5 and running:
            name = rng.choice(running)
            desk.placement.ended(name, 10, now)
            del work.requests[name]
        else:
            kind, own = rng.randrange(4), rng.randint(1, 40)
            prefix = path(1000 * kind, 60) + path(10_000 + 100 * desk.num, own)
            length = float(rng.randint(1, 300))
            hits = {name: 60 if kind in cached[name] else 0 for name in "abc"}
            costs = {
                name: brute_force_cost_s(work, slot, len(prefix), hits[name], length) for slot, name in enumerate("abc")
            }
            choice = desk.place(prefix, length, now)
            assert choice.cost_s == pytest.approx(costs[choice.replica], rel=1e-6, abs=1e-9)
            assert choice.cost_s <= min(costs.values()) + 1e-9
            cached[choice.replica].add(kind)
            prefill_s = COST.prefill_s(len(prefix) - choice.hit_len, choice.hit_len)
            work.requests[f"r{desk.num}"] = PlainRequest(
                "abc".index(choice.replica), len(prefix), len(prefix) - choice.hit_len, length, prefill_s
            )
        desk.placement.check_integrity()
