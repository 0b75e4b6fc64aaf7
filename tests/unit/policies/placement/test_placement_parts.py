"""The parts of placement by themselves: a fixed partition, doubled queueing, loads of a window, what is left to do."""

from __future__ import annotations

import random

import numpy as np
import pytest

from farsight.core.costs import StepCost
from farsight.core.errors import IntegrityError, InvalidValueError
from farsight.core.request import Request, SamplingParams
from farsight.policies.placement.base import ReplicaLoad
from farsight.policies.placement.e2 import PrefixScaling
from farsight.policies.placement.load_cost import LoadWindow, Regressions
from farsight.policies.placement.prefix_tree import PrefixNode
from farsight.policies.placement.replica_slots import ReplicaSlots, bits, is_single
from farsight.policies.placement.residual_work import RequestLengths, ResidualWork
from lab.reproduce.preble.runs import OraclePartition
from tests.unit.policies.plain_work import PlainRequest, PlainWork

REQUEST = Request("r", 0, "i", (1,), SamplingParams(1))


def owner(policy: OraclePartition, prefix: tuple[int, ...], names: str = "abc") -> str:
    return policy.choose(REQUEST, prefix, tuple(ReplicaLoad(name, 0, 0.0) for name in names), 0.0).replica


@pytest.mark.parametrize(
    ("loads", "num", "num_leading", "prefixes", "owners"),
    [
        ((5.0, 4.0, 3.0, 3.0, 3.0), 2, 0, [(10, 99), (11, 99), (12, 99), (13, 99), (14, 99)], "abbab"),
        ((1.0, 1.0, 1.0), 3, 0, [(11, 1), (11,), (11, 7, 8)], "bbb"),
        ((5.0, 1.0, 2.0), 3, 0, [(99,), (), (11,)], "ccc"),
        ((3.0, 2.0, 1.0), 3, 0, [(10,), (11,), (12,)], "aba"),
        ((3.0, 2.0, 1.0), 3, 1, [(7, 10), (7, 11), (7, 12), (10,), (7, 99)], "abccc"),
    ],
    ids=[
        "the heaviest goes to the lightest first",
        "who shares the first element shares the replica",
        "the unknown goes to the lightest",
        "fewer replicas share what more would have",
        "what all prompts share tells nothing",
    ],
)
def test_prefixes_have_owners(
    loads: tuple[float, ...], num: int, num_leading: int, prefixes: list[tuple[int, ...]], owners: str
) -> None:
    policy = OraclePartition({10 + i: load for i, load in enumerate(loads)}, num, 64, num_leading=num_leading)
    names = "ab" if owners in ("abbab", "aba") else "abc"
    assert "".join(owner(policy, prefix, names) for prefix in prefixes) == owners


@pytest.mark.parametrize("seed", range(5))
def test_no_replica_has_more_than_the_mean_and_one_prefix(seed: int) -> None:
    rng = random.Random(seed)
    loads = {i: rng.paretovariate(1.1) for i in range(60)}
    policy = OraclePartition(loads, 3, 64)
    totals = dict.fromkeys("abc", 0.0)
    for first, load in loads.items():
        totals[owner(policy, (first,))] += load
    assert max(totals.values()) <= sum(loads.values()) / 3 + max(loads.values())


NODE = PrefixNode((1,), None)


def scaling_of(*samples: tuple[float, float], window_s: float = 100.0) -> PrefixScaling:
    """``samples`` of (instant, queueing seconds)."""
    scaling = PrefixScaling(window_s)
    for at, queue_s in samples:
        scaling.advance(at)
        scaling.observe(NODE, queue_s, at)
    return scaling


def test_a_restart_forgets_what_was_and_its_samples_expire_quietly() -> None:
    scaling = scaling_of((0.0, 1.0), (60.0, 9.0))
    assert scaling.doubled(NODE) and not scaling.doubled(PrefixNode((1,), None)), "another prefix"
    scaling.restart(NODE)
    assert not scaling.doubled(NODE)
    scaling.observe(NODE, 1.0, 70.0)
    scaling.advance(130.0)
    assert not scaling.doubled(NODE)
    scaling.observe(NODE, 2.0, 130.0)
    assert scaling.doubled(NODE), "1 against 2: the 9 of before the restart is not among them"


def test_nothing_is_remembered_beyond_the_window() -> None:
    scaling = scaling_of((0.0, 1.0), (60.0, 2.0))
    scaling.advance(100.0)
    assert not scaling.doubled(NODE), "nothing early is left"
    scaling.advance(160.0)
    assert not scaling._queueing


@pytest.mark.parametrize("seed", range(20))
def test_random_samples_against_a_list(seed: int) -> None:
    rng = random.Random(seed)
    scaling, samples, now = PrefixScaling(10.0), [], 0.0
    for _ in range(100):
        now += rng.choice([0.0, 0.5, 3.0])
        scaling.advance(now)
        samples.append((now, float(rng.randint(0, 8))))
        scaling.observe(NODE, samples[-1][1], now)
        late = [queue_s for at, queue_s in samples if at > now - 5.0]
        early = [queue_s for at, queue_s in samples if now - 10.0 < at <= now - 5.0]
        expected = bool(early) and sum(late) > 0 and sum(late) / len(late) >= 2 * sum(early) / len(early)
        assert scaling.doubled(NODE) is expected


TIMES = Regressions(lambda new, context: 1e-3 * new, lambda output, context: output * (2e-3 + 1e-6 * context))


@pytest.mark.parametrize("seed", range(10))
def test_running_sums_are_the_sums_over_requests(seed: int) -> None:
    rng = random.Random(seed)
    load = LoadWindow(TIMES, 10.0, initial_output_len=7.0)
    load.add_replica()
    load.add_replica()
    placed: list[tuple[int, float, int]] = []
    outputs: list[tuple[float, int, int]] = []
    now = 0.0
    for _ in range(200):
        now += rng.choice([0.0, 0.3, 2.0])
        load.advance(now)
        move, replica = (
            rng.choice(["add", "add", "remove", "ended", "clear" if rng.random() < 0.1 else "add"]),
            rng.randrange(2),
        )
        if move == "add":
            placed.append((replica, rng.random(), rng.randint(1, 5000)))
            load.add(*placed[-1])
        elif move == "remove" and placed:
            load.remove(*placed.pop(rng.randrange(len(placed))))
        elif move == "ended":
            outputs.append((now, replica, rng.randint(0, 300)))
            load.ended(replica, outputs[-1][2], now)
        elif move == "clear":
            load.clear(replica)
            placed = [each for each in placed if each[0] != replica]
            outputs = [each for each in outputs if each[1] != replica]
        load.check_integrity()
        for i in range(2):
            lens = [length for at, where, length in outputs if where == i and at > now - 10.0]
            mean = sum(lens) / len(lens) if lens else 7.0
            mine = [each for each in placed if each[0] == i]
            assert load.mean_output_len(i) == pytest.approx(mean)
            assert load.prefill_s[i] == pytest.approx(sum(prefill_s for _, prefill_s, _ in mine))
            assert load.decode_s[i] == pytest.approx(sum(TIMES.decode_s(mean, context) for _, _, context in mine))


def test_an_empty_window_weighs_nothing_at_all() -> None:
    load = LoadWindow(TIMES, 10.0, 0.0)
    load.add_replica()
    for prefill_s in (0.1, 0.2, 0.3):
        load.add(0, prefill_s, 1)
    for prefill_s in (0.1, 0.2, 0.3):
        load.remove(0, prefill_s, 1)
    assert load.prefill_s[0] == 0.0, "0.1 + 0.2 + 0.3 - 0.1 - 0.2 - 0.3 is not"


def test_slots_are_given_again_and_closed_until_opened() -> None:
    slots = ReplicaSlots()
    assert [slots.take(name) for name in "abc"] == [(0, True), (1, True), (2, True)]
    assert slots.closed.tolist() == [np.inf] * 3
    loads = tuple(ReplicaLoad(name, 0, 0.0) for name in "ca")
    slots.open(loads)
    assert (slots.open_mask, slots.closed.tolist()) == (0b101, [0.0, np.inf, 0.0])
    slots.give_back("a")
    assert slots.closed.tolist() == [np.inf, np.inf, 0.0]
    assert slots.take("d") == (0, False)
    assert (slots.find("a"), slots.find("d")) == (None, 0)
    with pytest.raises(InvalidValueError, match="loads"):
        slots.open(loads)


@pytest.mark.parametrize("num", [1, 7, 8, 9, 1000])
def test_bits_of_a_mask(num: int) -> None:
    rng = random.Random(num)
    chosen = [rng.random() < 0.5 for _ in range(num)]
    mask = sum(1 << i for i, each in enumerate(chosen) if each)
    assert bits(mask, num).tolist() == chosen
    assert is_single(1 << num)
    assert not is_single(1 << num | 1)


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
