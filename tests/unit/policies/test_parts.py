"""FCFS order, watermark admission, recompute victims, presets."""

from __future__ import annotations

import pytest

from core.errors import ConfigError
from policies.fcfs import FcfsQueue
from policies.presets import PRESETS, build_scheduler, find_preset
from policies.recompute import choose_victims
from policies.replica_scheduler import SchedulerLimits
from policies.watermark import WatermarkAdmission


def test_fcfs_keeps_arrival_order_and_puts_preempted_first_oldest_first() -> None:
    queue = FcfsQueue()
    for name in "cd":
        queue.push(name)
    queue.push_front("b")  # the newest victim leaves first ...
    queue.push_front("a")  # ... then an older one
    assert list(queue) == ["a", "b", "c", "d"]
    queue.remove("b")
    queue.remove("unknown")
    assert list(queue) == ["a", "c", "d"]
    assert len(queue) == 3
    assert "b" not in queue


@pytest.mark.parametrize(
    ("used", "new", "admitted"),
    [(0, 100, True), (0, 101, False), (50, 45, True), (50, 46, False), (95, 1, False), (1, 94, True)],
)
def test_watermark_admits_up_to_its_share_but_an_empty_pool_takes_what_fits(
    used: int, new: int, admitted: bool
) -> None:
    assert WatermarkAdmission(0.95).admits(used, new, num_blocks=100) is admitted


def test_aggressive_99_of_the_past_future_example() -> None:
    """Algorithms section 4, example 1: 12 + 4 tokens of 21 are admitted, whatever the future holds."""
    assert WatermarkAdmission(0.99).admits(used_blocks=12, new_blocks=4, num_blocks=21)


def test_victims_are_the_newest_until_enough_is_free_never_the_oldest() -> None:
    admitted = [("a", 5), ("b", 3), ("c", 1)]
    assert choose_victims(admitted, 1) == ["c"]
    assert choose_victims(admitted, 2) == ["c", "b"]
    assert choose_victims(admitted, 100) == ["c", "b"]
    assert choose_victims([("a", 5)], 1) == []
    assert choose_victims([], 1) == []


def test_every_preset_builds_and_an_unknown_one_names_the_nearest() -> None:
    for name in PRESETS:
        build_scheduler(name, watermark=0.9, limits=SchedulerLimits(4, 4)).check_integrity()
    with pytest.raises(ConfigError, match=r"scheduler\.preset.*did you mean 'fcfs'"):
        find_preset("fcf")
