"""When queueing of a prefix has doubled."""

from __future__ import annotations

import random

import pytest

from policies.placement.prefix_scaling import PrefixScaling
from policies.placement.prefix_tree import PrefixNode

NODE = PrefixNode((1,), None)


def scaling_of(*samples: tuple[float, float], window_s: float = 100.0) -> PrefixScaling:
    """``samples`` of (instant, queueing seconds)."""
    scaling = PrefixScaling(window_s)
    for at, queue_s in samples:
        scaling.advance(at)
        scaling.observe(NODE, queue_s, at)
    return scaling


@pytest.mark.parametrize(
    ("samples", "doubled"),
    [
        (((0.0, 1.0), (60.0, 2.0)), True),
        (((0.0, 1.0), (60.0, 1.99)), False),
        (((0.0, 1.0), (40.0, 2.0)), False),
        (((0.0, 1.0), (0.0, 3.0), (60.0, 3.0), (61.0, 5.0)), True),
        (((0.0, 1.0), (0.0, 3.0), (60.0, 3.0), (61.0, 4.9)), False),
        (((0.0, 0.0), (60.0, 0.0)), False),
        (((0.0, 0.0), (60.0, 0.1)), True),
        (((60.0, 5.0),), False),
    ],
)
def test_the_mean_of_the_later_half_is_twice_that_of_the_earlier(
    samples: tuple[tuple[float, float], ...], doubled: bool
) -> None:
    assert scaling_of(*samples).doubled(NODE) is doubled


def test_prefixes_are_told_apart() -> None:
    scaling = scaling_of((0.0, 1.0), (60.0, 2.0))
    assert not scaling.doubled(PrefixNode((1,), None))


def test_a_restart_forgets_what_was_and_its_samples_expire_quietly() -> None:
    scaling = scaling_of((0.0, 1.0), (60.0, 9.0))
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
