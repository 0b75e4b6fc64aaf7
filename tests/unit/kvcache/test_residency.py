"""The shadow of where KV is: the newest report counts, and what has moved is told once."""

from __future__ import annotations

import dataclasses

from core.messages.kv import KVTraffic, KVUsage
from core.messages.plans import SlotProgress, StepReport
from core.request import SequenceStatus
from kvcache.residency import ResidencyMirror, total_usage


def report(seq: int, traffic: KVTraffic, *, free: int = 6, incarnation: str = "w") -> StepReport:
    progress = SlotProgress("a", 0, SequenceStatus.RUNNING, 0, 9, 1, num_blocks=5, stalled=False)
    return StepReport(
        *(incarnation, 1, seq, 1, free, 2, (progress,), (), ()),
        shared_blocks=1,
        num_host_blocks=7,
        free_host_blocks=4,
        flying_blocks=3,
        traffic=traffic,
    )


def test_what_is_known_is_what_the_newest_report_says() -> None:
    shadow = ResidencyMirror()
    assert shadow.usage == KVUsage()
    shadow.observe(report(2, KVTraffic(offloads=1)))
    assert shadow.usage == KVUsage(10, 6, 1, 2, 7, 4, 3, KVTraffic(offloads=1))
    shadow.observe(report(1, KVTraffic(), free=0))
    assert shadow.usage.free_blocks == 6


def test_what_has_moved_is_told_once_and_from_the_start_of_each_life() -> None:
    shadow = ResidencyMirror()
    assert shadow.observe(report(1, KVTraffic(2, 1, 20, 10))) == KVTraffic(2, 1, 20, 10)
    assert shadow.observe(report(1, KVTraffic(2, 1, 20, 10))) == KVTraffic()
    assert shadow.observe(report(3, KVTraffic(5, 1, 50, 10, 1, 9))) == KVTraffic(3, 0, 30, 0, 1, 9)
    again = report(1, KVTraffic(1, 0, 10), incarnation="another")
    assert shadow.observe(again) == KVTraffic(1, 0, 10)


def test_replicas_add_up() -> None:
    one = KVUsage(10, 6, 1, 2, 7, 4, 3, KVTraffic(1, 2, 3, 4, 5, 6))
    two = dataclasses.replace(one, free_blocks=1)
    assert total_usage([one, two]) == KVUsage(20, 7, 2, 4, 14, 8, 6, KVTraffic(2, 4, 6, 8, 10, 12))
    assert total_usage([]) == KVUsage()
