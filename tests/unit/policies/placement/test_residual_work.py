"""What is still to be done on each replica: the clock of tokens, forecasts that change, the wait for memory."""

from __future__ import annotations

import random

import pytest

from core.costs import StepCost
from core.errors import IntegrityError
from policies.placement.residual_work import RequestLengths, ResidualWork
from tests.unit.policies.plain_work import PlainRequest, PlainWork

COST = StepCost(base_s=0.01, prefill_token_s=1e-3, decode_seq_s=0.01, context_token_s=0.0)
"""A step of n sequences takes 10 ms and 10 ms for each."""

ANY = RequestLengths(prompt_len=10, had_len=0, most=1000)


def work_of(num_replicas: int = 1) -> ResidualWork:
    work = ResidualWork(COST)
    for _ in range(num_replicas):
        work.add_replica()
    return work


def running(work: ResidualWork, name: str, left: float, own_len: int = 10, slot: int = 0) -> None:
    work.add(name, slot, ANY, left, own_len, prefill_s=0.5)
    work.start(name, own_len)
    work.check_integrity()


def left_of(work: ResidualWork, slot: int = 0) -> list[float]:
    return sorted(value for value in work.remaining()[slot].tolist() if value)


def test_a_forecast_that_comes_later_counts_from_the_placement_on() -> None:
    work = work_of()
    work.add("a", 0, RequestLengths(prompt_len=10, had_len=20, most=300), 40.0, 10, 0.0)
    work.start("a", 10)
    work.advance(0.2)
    work.predict("a", 130.0)
    assert left_of(work) == [pytest.approx(100.0)], "130 tokens, of which it came with 20 and has got 10"
    work.predict("a", 4000.0)
    assert left_of(work) == [pytest.approx(290.0)], "it may have 300"
    work.predict("unknown", 5.0)


@pytest.mark.parametrize(("predicted", "left"), [(130.0, 110.0), (5.0, 1.0), (4000.0, 300.0)])
def test_a_resumed_request_has_the_rest_before_it(predicted: float, left: float) -> None:
    assert RequestLengths(prompt_len=50, had_len=20, most=300).left_of(predicted) == left


def test_what_does_not_add_up_is_noticed() -> None:
    work = work_of()
    running(work, "a", 10.0)
    work.queued_s[0] += 1.0
    with pytest.raises(IntegrityError, match="prefill"):
        work.check_integrity()
    work = work_of()
    running(work, "a", 10.0)
    work.num_requests[0] += 1
    with pytest.raises(IntegrityError, match="running"):
        work.check_integrity()


COSTS = (StepCost(0.01, 1e-3, 2e-3, 1e-5), StepCost(0.03, 1e-3, 1e-3, 2e-5))
NUM_REPLICAS = 3


class Both:
    """The same history told to both."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.work, self.plain = ResidualWork(COSTS[0]), PlainWork(COSTS[0])
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
            self.work.predict(name, length)
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
        self.work.add(f"r{self.num}", slot, RequestLengths(prompt_len, 0, 1000), left, own_len, prefill_s)
        self.plain.requests[f"r{self.num}"] = PlainRequest(slot, prompt_len, own_len, left, prefill_s)

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
        for mine, other in zip(
            zip(*self.work.meetings(length), strict=True), self.plain.meetings(length, NUM_REPLICAS), strict=True
        ):
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
    assert num_late > 10, "some requests have outlived the forecast"
    assert 0.1 < sum(wait_s > 0 for wait_s in waits_s) / len(waits_s) < 0.9


def test_what_is_left_of_another_instant_is_noticed() -> None:
    both = Both(0)
    for _ in range(20):
        both.step()
    both.compare()
    both.work.remaining()[0, 0] += 1.0
    with pytest.raises(IntegrityError, match="present instant"):
        both.work.check_integrity()


def test_a_seat_that_is_free_has_nothing() -> None:
    work = ResidualWork(COSTS[0])
    work.add_replica()
    work._own_lens[0, 3] = 5.0
    with pytest.raises(IntegrityError, match="free"):
        work.check_integrity()
