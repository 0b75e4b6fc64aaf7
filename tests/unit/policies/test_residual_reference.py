"""What is still to be done on each replica, after any history, against the definition written out by request."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from core.costs import StepCost
from core.errors import IntegrityError
from policies.length_law import MIN_REMAINING
from policies.residual_work import Demand, ResidualWork

COSTS = (StepCost(0.01, 1e-3, 2e-3, 1e-5), StepCost(0.03, 1e-3, 1e-3, 2e-5))
NUM_REPLICAS = 3


@dataclass
class Plain:
    slot: int
    prompt_len: int
    own_len: int
    length: float
    prefill_s: float
    produced: float = 0.0
    started: bool = False

    @property
    def left(self) -> float:
        left = self.length - self.produced
        return left if left > 0 else max(self.produced / 4, MIN_REMAINING)


@dataclass
class PlainWork:
    """Tokens are added up event by event, and every answer is worked out from all requests."""

    cost: StepCost = COSTS[0]
    now: float = 0.0
    requests: dict[str, Plain] = field(default_factory=dict)

    def on(self, slot: int) -> list[Plain]:
        return [each for each in self.requests.values() if each.slot == slot]

    def step_s(self, slot: int) -> float:
        running = [each for each in self.on(slot) if each.started]
        return self.cost.step_s(0, max(1, len(running)), sum(each.prompt_len for each in running))

    def advance(self, now: float) -> None:
        for slot in range(NUM_REPLICAS):
            for each in self.on(slot):
                each.produced += (now - self.now) / self.step_s(slot) if each.started else 0.0
        self.now = now

    def meetings(self, length: float) -> list[tuple[float, float]]:
        found = []
        for slot in range(NUM_REPLICAS):
            shared = [(min(each.left, length), each.prompt_len) for each in self.on(slot)]
            found.append((sum(steps for steps, _ in shared), sum(steps * context for steps, context in shared)))
        return found

    def memory_wait_s(self, slot: int, own_len: int, length: float, capacity: int) -> float:
        """The batch run forward to each end in turn: who is still there has grown by as many tokens."""
        others = sorted(self.on(slot), key=lambda each: each.left)
        entries = [(int(each.own_len + each.produced), math.ceil(each.left)) for each in others]
        entries.append((own_len, math.ceil(length)))
        peak = max(sum(base + end for base, left in entries if left >= end) for _, end in entries)
        excess, wait = float(peak - capacity), 0.0
        for each in others:
            if excess > 0:
                excess -= each.own_len + each.produced + math.ceil(each.left)
                wait = math.ceil(each.left) * self.step_s(slot)
        return wait


class Both:
    """The same history told to both."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.work, self.plain = ResidualWork(COSTS[0]), PlainWork()
        for _ in range(NUM_REPLICAS):
            self.work.add_replica()
        self.num = 0

    def step(self) -> None:
        """One event; every other one at the instant of the one before."""
        rng, requests = self.rng, self.plain.requests
        if rng.random() < 0.5:
            now = self.plain.now + rng.expovariate(2.0)
            self.work.advance(now)
            self.plain.advance(now)
        name = rng.choice(list(requests)) if requests else ""
        action = rng.random()
        if action < 0.45 or not name:
            self._add()
        elif action < 0.7:
            own_len = requests[name].own_len if requests[name].started else rng.randint(1, requests[name].prompt_len)
            self.work.start(name, own_len)
            requests[name].started, requests[name].own_len = True, own_len
        elif action < 0.87:
            self.work.remove(name)
            del requests[name]
        elif action < 0.97:
            length = float(rng.randint(1, 300))
            self.work.foresee(name, length)
            requests[name].length = length
        elif action < 0.985:
            self.plain.cost = rng.choice(COSTS)
            self.work.price(self.plain.cost)
        else:
            slot = rng.randrange(NUM_REPLICAS)
            self.work.clear(slot)
            self.plain.requests = {name: each for name, each in requests.items() if each.slot != slot}

    def _add(self) -> None:
        rng, self.num = self.rng, self.num + 1
        slot, prompt_len = rng.randrange(NUM_REPLICAS), rng.randint(1, 400)
        own_len, left, prefill_s = rng.randint(1, prompt_len), rng.uniform(1, 200), rng.random()
        self.work.add(f"r{self.num}", slot, Demand(prompt_len, 0, 1000), left, own_len, prefill_s)
        self.plain.requests[f"r{self.num}"] = Plain(slot, prompt_len, own_len, left, prefill_s)

    def compare(self) -> None:
        self.work.check_integrity()
        for slot in range(NUM_REPLICAS):
            there = self.plain.on(slot)
            left = sorted(value for value in self.work.remaining()[slot].tolist() if value)
            assert left == pytest.approx(sorted(each.left for each in there))
            queued_s = sum(each.prefill_s for each in there if not each.started)
            assert self.work.queued_s[slot] == pytest.approx(queued_s, abs=1e-9)
            assert self.work.num_requests[slot] == len(there)
        length = self.rng.uniform(1, 300)
        for mine, other in zip(zip(*self.work.meetings(length), strict=True), self.plain.meetings(length), strict=True):
            assert mine == pytest.approx(other)

    def compare_wait(self) -> float:
        """With room for some share of what all of them come to."""
        slot, own_len, length = self.rng.randrange(NUM_REPLICAS), self.rng.randint(1, 400), self.rng.uniform(1, 300)
        whole = own_len + length + sum(each.own_len + each.produced + each.left for each in self.plain.on(slot))
        capacity = int(self.rng.uniform(0.5, 1.1) * whole)
        wait_s = self.work.memory_wait_s(slot, own_len, length, capacity)
        assert wait_s == pytest.approx(self.plain.memory_wait_s(slot, own_len, length, capacity))
        return wait_s


@pytest.mark.parametrize("seed", range(4))
def test_any_history_leaves_what_the_definition_says(seed: int) -> None:
    both, waits_s, num_late = Both(seed), list[float](), 0
    for _ in range(250):
        both.step()
        if both.rng.random() < 0.8:  # else the next event comes before anybody has asked
            both.compare()
            waits_s.append(both.compare_wait())
            num_late += any(each.produced >= each.length for each in both.plain.requests.values())
    assert num_late > 10, "somebody has outlived the forecast"
    assert 0.1 < sum(wait_s > 0 for wait_s in waits_s) / len(waits_s) < 0.9


def test_what_is_left_of_another_instant_is_noticed() -> None:
    both = Both(0)
    for _ in range(20):
        both.step()
    both.compare()
    both.work.remaining()[0, 0] += 1.0
    with pytest.raises(IntegrityError, match="as of now"):
        both.work.check_integrity()


def test_a_seat_that_is_free_has_nothing() -> None:
    work = ResidualWork(COSTS[0])
    work.add_replica()
    work._own_lens[0, 3] = 5.0
    with pytest.raises(IntegrityError, match="free"):
        work.check_integrity()
