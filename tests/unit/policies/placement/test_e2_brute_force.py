"""E2, plain and with forecasts: every decision against brute force, and what makes a replica dearer."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, replace

import pytest

from farsight.core.config.scheduling import PlacementConfig
from farsight.core.costs import StepCost
from farsight.core.request import Request, SamplingParams
from farsight.policies.placement.base import ReplicaLoad
from farsight.policies.placement.e2 import E2Router
from farsight.policies.placement.e2_forecast import INITIAL_OUTPUT_LEN, E2Forecast, ForecastChoice
from farsight.policies.placement.load_cost import Regressions
from farsight.policies.placement.prefix_tree import Path, PrefixNode
from tests.unit.policies.batch_jobs import seeds
from tests.unit.policies.e2_driver import BARE, path
from tests.unit.policies.global_table import forecast
from tests.unit.policies.naive_trie import NaiveTrie, path_of
from tests.unit.policies.plain_work import PlainRequest, PlainWork


@dataclass
class Past:
    """A request as brute force remembers it."""

    at: float
    path: Path
    prompt_len: int
    replica: int
    prefill_s: float
    end: PrefixNode


class BruteForce:
    """Algorithms 1 and 2 from all that ever happened."""

    def __init__(
        self, regressions: Regressions, config: PlacementConfig, capacity: int, num: int, block_size: int
    ) -> None:
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
        self, replica: int, path: Path, prompt_len: int, nodes: dict[Path, PrefixNode]
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
        self,
        path_nodes: list[PrefixNode],
        path: Path,
        prompt_len: int,
        replicas: list[int],
        nodes: dict[Path, PrefixNode],
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

    def cheapest(self, among: list[int], path: Path, prompt_len: int, nodes: dict[Path, PrefixNode]) -> list[int]:
        costs = {replica: sum(self.cost(replica, path, prompt_len, nodes)[:3]) for replica in among}
        return [replica for replica in among if costs[replica] <= min(costs.values()) + 1e-9]


def nodes_of(router: E2Router) -> dict[Path, PrefixNode]:
    """By position, the node that it lies in."""
    nodes: dict[Path, PrefixNode] = {}
    stack: list[tuple[PrefixNode, Path]] = [(router.tree.root, ())]
    while stack:
        node, start = stack.pop()
        for child in node.children.values():
            nodes.update({start + child.span[: i + 1]: child for i in range(len(child.span))})
            stack.append((child, start + child.span))
    return nodes


AFFINE = Regressions(
    lambda new, context: 3e-3 + 1e-3 * new + 1e-5 * context, lambda output, context: output * (4e-3 + 1e-5 * context)
)


@pytest.mark.parametrize("seed", seeds(4, nightly=8))
@pytest.mark.parametrize("config", [BARE, PlacementConfig(rebalance_after=3, autoscale=False)], ids=["bare", "whole"])
def test_every_decision_is_that_of_brute_force(seed: int, config: PlacementConfig) -> None:
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
        router.prefixes.advance(now)
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
        end = router.prefixes.in_flight[f"r{i}"].end
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
        router.tree.evict(prefix, replica)
        brute.trie.evict(prefix, replica)
    elif name and move == "end":
        past, output_len = in_flight.pop(name), rng.choice([None, 3, 200])
        router.ended(name, output_len, now)
        brute.trie.release(past.path, past.replica)
        if output_len is not None:
            brute.outputs.append((now, past.replica, output_len))
    elif name:
        past = in_flight[name]
        believed, cached = router.prefixes.in_flight[name].hit_len, 4 * rng.randint(0, len(past.path))
        router.started(name, cached, 0.0, now)
        past.prefill_s = brute.regressions.prefill_s(past.prompt_len - cached, past.prompt_len)
        if cached < believed:
            brute.trie.correct(past.path, past.replica, cached // 4)


CAPACITY = 3000
"""The capacity of each replica where brute force decides as well, in tokens."""

STEPS = StepCost(base_s=0.01, prefill_token_s=1e-3, decode_seq_s=1e-3, context_token_s=1e-6)


class ForecastDriver:
    """Places requests, named in order, on replicas that hold ``capacity`` tokens; a block is one token."""

    def __init__(self, names: str = "ab", capacity: int = 100_000, cost: StepCost = STEPS) -> None:
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
    driver = ForecastDriver()
    driver.place(path(0, 100), only="b")
    driver.start(1)
    driver.end(1)
    choice = driver.place(path(0, 120))
    assert (choice.replica, choice.reason, choice.hit_len) == ("b", "hit", 100)
    assert choice.prefill_s == pytest.approx(STEPS.prefill_s(20)) and choice.cost_s == choice.prefill_s


def test_a_forecast_that_comes_later_moves_those_that_follow() -> None:
    driver = ForecastDriver()
    for num, name in ((1, "a"), (2, "b")):
        driver.place(path(1000 * num, 10), mean=None, only=name)
        driver.start(num)
    assert driver.place(path(5000, 10), mean=900.0).replica == "a"
    driver.end(3)
    driver.placement.foreseen("r1", forecast(800.0), 0.0)
    driver.placement.foreseen("r2", forecast(20.0), 0.0)
    assert driver.place(path(6000, 10), mean=900.0).replica == "b"


def test_without_a_forecast_the_outputs_of_all_replicas_tell() -> None:
    driver = ForecastDriver()
    assert driver.place(path(0, 10), mean=None).predicted_len == INITIAL_OUTPUT_LEN
    assert driver.place(path(100, 10), mean=None, most=30).predicted_len == 30
    driver.end(1, output_len=40)
    driver.end(2, output_len=20)
    assert driver.place(path(200, 10), mean=None).predicted_len == 30


def test_a_resumed_request_is_expected_to_make_the_rest() -> None:
    driver = ForecastDriver()
    request = Request("r", 1, "i", (1,) * 10, SamplingParams(100), (2,) * 30, forecast=forecast(80.0))
    assert driver.placement.choose(request, path(0, 40), driver.loads, 0.0).predicted_len == 50.0


def test_room_for_a_prompt_is_made_where_it_costs_least() -> None:
    driver = ForecastDriver(capacity=100)
    driver.place(path(0, 80), only="a", mean=1.0)
    driver.start(1)
    driver.end(1)
    choice = driver.place(path(1000, 50), mean=1.0, only="a")
    assert choice.evict_s == pytest.approx(STEPS.prefill_s(30, 50)), "30 of 80 tokens, which one of one request used"
    driver.end(2)
    assert driver.place(path(2000, 50), mean=1.0).replica == "b"


def test_measured_prices_replace_the_prior() -> None:
    driver = ForecastDriver()
    slow = StepCost(0.1, 2e-3, 5e-3, 0.0)
    driver.place(path(0, 10), mean=100.0, only="a")
    driver.start(1)
    driver.placement.priced("a", slow)
    driver.placement.check_integrity()
    choice = driver.place(path(1000, 50), mean=100.0, only="a", now=0.0)
    assert choice.prefill_s == pytest.approx(2 * slow.prefill_s(50))
    assert choice.decode_s == pytest.approx(2 * 100 * slow.decode_seq_s)


def test_a_replica_that_comes_again_has_nothing_and_one_that_is_gone_gets_nothing() -> None:
    driver = ForecastDriver()
    for _ in range(3):
        driver.place(path(0, 100), only="a", mean=900.0)
    driver.start(1)
    driver.placement.replica_up("a", 100_000)
    driver.placement.check_integrity()
    choice = driver.place(path(0, 100), only="a")
    assert (choice.hit_len, choice.queue_s, choice.decode_s) == (0, 0.0, 0.0)
    driver.end(1)  # of the life before: heard late, and changes nothing
    driver.placement.replica_gone("a")
    driver.placement.replica_gone("nobody")
    driver.placement.check_integrity()
    driver.placement.replica_up("c", 100_000)
    driver.loads = (driver.loads[1], ReplicaLoad("c", 0, 0.0))
    assert {driver.place(path(100 * i, 100)).replica for i in range(4)} == {"b", "c"}


def brute_force_cost_s(work: PlainWork, slot: int, prompt_len: int, hit_len: int, length: float) -> float:
    """A request's time on a replica: queue, prefill for all that are there, decode, wait for memory; no eviction."""
    there = work.on(slot)
    cost_s = sum(each.prefill_s for each in there if not each.started)
    cost_s += (1 + len(there)) * STEPS.prefill_s(prompt_len - hit_len, hit_len)
    for each in there:
        together = min(each.left, length)
        cost_s += together * (STEPS.decode_seq_s + STEPS.context_token_s * prompt_len)
        cost_s += together * (STEPS.decode_seq_s + STEPS.context_token_s * each.prompt_len)
    return cost_s + work.memory_wait_s(slot, prompt_len - hit_len, length, CAPACITY)


@pytest.mark.parametrize("seed", seeds(4, nightly=4))
def test_every_decision_with_forecasts_is_that_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    driver, work, now = ForecastDriver("abc", CAPACITY), PlainWork(STEPS), 0.0
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
            driver.placement.started(name, each.prompt_len - each.own_len, 0.0, now)
            each.started = True
        elif action < 0.5 and running:
            name = rng.choice(running)
            driver.placement.ended(name, 10, now)
            del work.requests[name]
        else:
            kind, own = rng.randrange(4), rng.randint(1, 40)
            prefix = path(1000 * kind, 60) + path(10_000 + 100 * driver.num, own)
            length = float(rng.randint(1, 300))
            hits = {name: 60 if kind in cached[name] else 0 for name in "abc"}
            costs = {
                name: brute_force_cost_s(work, slot, len(prefix), hits[name], length) for slot, name in enumerate("abc")
            }
            choice = driver.place(prefix, length, now)
            assert choice.cost_s == pytest.approx(costs[choice.replica], rel=1e-6, abs=1e-9)
            assert choice.cost_s <= min(costs.values()) + 1e-9
            cached[choice.replica].add(kind)
            prefill_s = STEPS.prefill_s(len(prefix) - choice.hit_len, choice.hit_len)
            work.requests[f"r{driver.num}"] = PlainRequest(
                "abc".index(choice.replica), len(prefix), len(prefix) - choice.hit_len, length, prefill_s
            )
        driver.placement.check_integrity()
