"""E2: every decision against brute force."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, replace

import pytest

from core.config.placement import PlacementConfig
from policies.placement.base import ReplicaLoad
from policies.placement.e2 import E2Router
from policies.placement.e2_profiles import Regressions
from policies.placement.prefix_tree import Path, PrefixNode
from tests.unit.policies.e2_desk import BARE
from tests.unit.policies.naive_trie import NaiveTrie, path_of


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


@pytest.mark.parametrize("seed", range(12))
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
