"""Priority groups by prefix hits."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest

from core.errors import InvalidValueError
from policies.interfaces import Job
from policies.order.hit_groups import HitGroups, quotas


def job(name: str, cached: int = 0, prompt: int = 100, at: float = 0.0, priority: int = 0) -> Job:
    return Job(name, at, prompt, 10, priority=priority, cached_len=cached)


def filled(order: HitGroups, num: int) -> Counter[int]:
    return Counter(order.group(each) for each in itertools.islice(order.ranked(0.0), num))


@pytest.mark.parametrize(
    ("cached", "prompt", "group"), [(63, 100, 6), (100, 100, 9), (0, 100, 0), (9, 100, 0), (10, 100, 1), (99, 100, 9)]
)
def test_the_group_is_the_hit_ratio_in_tenths(cached: int, prompt: int, group: int) -> None:
    """The paper's example: 63 of 100 tokens cached, P = 10, group 6."""
    assert HitGroups(55).group(job("r", cached, prompt)) == group


def test_ex5_quotas_and_the_slot_left_over() -> None:
    assert quotas(3, 10) == [1, 3, 5]
    order = HitGroups(10, num_groups=3)
    for i in range(10):
        for group, cached in enumerate((0, 50, 90)):
            order.add(job(f"{group}-{i}", cached), 0.0)
    assert filled(order, 10) == {0: 1, 1: 3, 2: 6}


def test_one_free_slot_at_a_time_starves_nobody() -> None:
    """Each end frees one slot; a hundred of the highest group wait all the time."""
    order = HitGroups(10, num_groups=3)
    low, num_top = job("low", 0), 0
    running: list[Job] = []
    order.add(low, 0.0)
    for _ in range(30):
        while sum(each not in running for each in order.ranked(0.0)) < 100:
            num_top += 1
            order.add(job(f"top-{num_top}", 100, at=1.0), 0.0)
        while len(running) < 10:
            chosen = next(each for each in order.ranked(0.0) if not each.is_resident)
            chosen.computed_len = 1
            order.changed(chosen)
            running.append(chosen)
        if low.is_resident:
            return
        order.remove(running.pop(0))
    pytest.fail("the lowest group never got its slot")


def test_urgency_comes_before_hits() -> None:
    order = HitGroups(4)
    hit, urgent, deadline = job("hit", 100), job("urgent", 0, priority=-1), job("deadline", 0)
    deadline.deadline_at = 5.0
    for each in (hit, urgent, deadline):
        order.add(each, 0.0)
    assert [each.request_id for each in order.ranked(0.0)] == ["urgent", "deadline", "hit"]


@pytest.mark.parametrize("seed", range(20))
def test_any_batch_holds_each_groups_share(seed: int) -> None:
    rng = random.Random(seed)
    num_groups, num_slots = rng.randint(1, 6), rng.randint(1, 40)
    order = HitGroups(num_slots, num_groups)
    jobs = [job(f"r{i}", rng.randint(0, 100), at=rng.random()) for i in range(rng.randint(0, 80))]
    for each in jobs:
        order.add(each, 0.0)
    ranked = list(order.ranked(0.0))
    assert sorted(each.request_id for each in ranked) == sorted(each.request_id for each in jobs)
    waiting = Counter(order.group(each) for each in jobs)
    taken = filled(order, num_slots)
    weights = num_groups * (num_groups + 1) / 2
    shares = {group: math.floor(num_slots * (group + 1) / weights) for group in range(num_groups)}
    assert all(taken[group] >= min(waiting[group], share) for group, share in shares.items())
    beyond = [group for group, share in shares.items() if taken[group] > share]
    assert all(taken[above] == waiting[above] for group in beyond for above in range(group + 1, num_groups))
    for group in range(num_groups):
        arrivals = [each.arrived_at for each in ranked if order.group(each) == group]
        assert arrivals == sorted(arrivals)


@pytest.mark.parametrize(("slots", "groups", "field"), [(0, 10, "num_slots"), (5, 0, "num_groups")])
def test_bad_parameters_are_named(slots: int, groups: int, field: str) -> None:
    with pytest.raises(InvalidValueError, match=field):
        HitGroups(slots, groups)
