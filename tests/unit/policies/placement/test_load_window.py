"""L of Algorithm 2 by running sums against the sum over requests; replicas as bits."""

from __future__ import annotations

import random

import numpy as np
import pytest

from core.errors import InvalidValueError
from policies.placement.base import ReplicaLoad
from policies.placement.e2_profiles import Regressions
from policies.placement.load_window import LoadWindow
from policies.placement.replica_slots import ReplicaSlots, bits, is_single

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
