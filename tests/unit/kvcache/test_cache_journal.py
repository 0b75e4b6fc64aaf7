"""What is told of a prefix cache: every change once it is heard, all of it where something was lost."""

from __future__ import annotations

import dataclasses
import random

import pytest

from farsight.core.errors import IntegrityError
from farsight.core.messages.kv import KVTraffic, KVUsage
from farsight.core.messages.plans import CachedRun, KVCacheEvent, SlotProgress, StepReport
from farsight.core.request import SequenceStatus
from farsight.kvcache.block_manager import BlockManager
from farsight.kvcache.cache_journal import CacheJournal, CacheMirror, ResidencyMirror, runs, total_usage

SIZE = 4


class Pool:
    """Sequences whose blocks are named by hand."""

    def __init__(self, num_blocks: int = 6) -> None:
        self.blocks = BlockManager(num_blocks, SIZE)
        self.journal = CacheJournal(self.blocks)

    def run(self, name: str, hashes: tuple[int, ...]) -> None:
        """A sequence of these blocks, which stay cached when it has ended."""
        shared = self.blocks.match(hashes, len(hashes))
        self.blocks.share(name, shared)
        assert self.blocks.grow(name, len(hashes) * SIZE) is not None
        self.blocks.register(name, len(shared), hashes, len(hashes))
        self.blocks.release(name)
        self.blocks.check_integrity()

    def cached(self) -> set[int]:
        return set(self.blocks._cached)


def test_the_first_notice_is_whole_and_later_ones_tell_what_has_changed() -> None:
    pool = Pool()
    pool.run("a", (1, 2, 3))
    assert pool.journal.notices(1) == (KVCacheEvent(1, True, (CachedRun(0, (1, 2, 3)),)),)
    pool.journal.acknowledge(1)
    assert pool.journal.notices(2) == ()
    pool.run("b", (1, 2, 4, 5))
    assert pool.journal.notices(3) == (KVCacheEvent(2, False, (CachedRun(2, (4, 5)),)),)
    pool.journal.acknowledge(3)
    pool.run("c", (7, 8, 9))
    (notice,) = pool.journal.notices(4)
    assert (notice.stored, notice.evicted) == ((CachedRun(0, (7, 8, 9)),), (3, 5)), "what was used longest ago"
    pool = Pool()
    first = pool.journal.notices(1)
    pool.run("a", (1,))
    both = pool.journal.notices(2)
    assert both[:1] == first, "until it is acknowledged"
    pool.journal.acknowledge(1)
    assert pool.journal.notices(3) == both[1:]
    pool.journal.acknowledge(2)
    assert pool.journal.notices(4) == ()
    pool = Pool(2)
    pool.run("a", (1, 2))
    pool.journal.notices(1)
    pool.journal.acknowledge(1)
    pool.run("b", (3,))
    pool.run("a", (1, 2))
    (notice,) = pool.journal.notices(2)
    assert notice == KVCacheEvent(2, False, (CachedRun(1, (2,)),), (3,)), "as it is now, whatever came and went"


def test_rather_than_more_than_the_pool_holds_everything_is_told_anew() -> None:
    pool = Pool(4)
    pool.journal.notices(1)
    for i in range(5):
        pool.run("a", (10 * i + 1, 10 * i + 2))
        assert sum(notice.num_hashes for notice in pool.journal.notices(2 + i)) <= 2 * 4
    *_, last = pool.journal.notices(9)
    for i in range(9):
        pool.run("b", (100 + i,))
    (notice,) = pool.journal.notices(10)
    assert notice.whole and notice.seq > last.seq
    assert {name for run in notice.stored for name in run.hashes} == pool.cached()


def test_a_shadow_takes_each_notice_once_and_in_order() -> None:
    shadow = CacheMirror()
    assert not shadow.take(KVCacheEvent(4, False, (CachedRun(0, (1,)),))), "nothing before the whole"
    assert shadow.missed and shadow.whole() is None
    assert shadow.take(KVCacheEvent(5, True, (CachedRun(0, (1, 2)), CachedRun(1, (3,)))))
    assert not shadow.take(KVCacheEvent(5, True))
    assert shadow.take(KVCacheEvent(6, False, (CachedRun(3, (4,)),), (2,)))
    assert [shadow.num_cached(each) for each in ((1, 3, 4), (1, 2, 3), (9,), ())] == [3, 1, 0, 0]
    assert shadow.whole() == KVCacheEvent(6, True, (CachedRun(0, (1, 3, 4)),))
    assert not shadow.take(KVCacheEvent(8, False, (), (1,)))
    assert shadow.missed and shadow.num_cached((1, 3, 4)) == 3, "it keeps what it believes"
    shadow.take(KVCacheEvent(9, True, (CachedRun(7, (8,)),)))
    with pytest.raises(IntegrityError, match="8 is cached, its predecessor 7 is not"):
        shadow.check_integrity()


def test_pairs_are_joined_where_they_follow_each_other() -> None:
    joined = [CachedRun(0, (1, 2)), CachedRun(1, (5, 6)), CachedRun(0, (9,))]
    assert list(runs([(1, 0), (2, 1), (5, 1), (6, 5), (9, 0)])) == joined
    assert list(runs([])) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_shadow_behind_lost_and_late_reports_has_the_cache_in_the_end(seed: int) -> None:
    rng = random.Random(seed)
    pool, shadow, heard = Pool(rng.choice([3, 6, 12])), CacheMirror(), 0
    for report in range(1, 120):
        for _ in range(rng.randrange(3)):
            digits = "".join(rng.choices("123", k=rng.randint(1, 3)))
            pool.run("s", tuple(int(digits[: end + 1]) for end in range(len(digits))))  # a name tells all before it
        notices = pool.journal.notices(report)
        if rng.random() < 0.3 and report < 119:
            continue  # lost
        for notice in notices:
            shadow.take(notice)
        if rng.random() < 0.7:
            heard = report
        pool.journal.acknowledge(heard)
        if shadow.missed:
            pool.journal.begin_anew()
    assert not shadow.missed
    whole = shadow.whole()
    assert whole is not None
    assert {name for run in whole.stored for name in run.hashes} == pool.cached()


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


def test_what_has_moved_is_told_once_and_from_the_start_of_each_life() -> None:
    shadow = ResidencyMirror()
    assert shadow.usage == KVUsage()
    assert shadow.observe(report(2, KVTraffic(2, 1, 20, 10))) == KVTraffic(2, 1, 20, 10)
    assert shadow.usage == KVUsage(10, 6, 1, 2, 7, 4, 3, KVTraffic(2, 1, 20, 10))
    assert shadow.observe(report(1, KVTraffic(), free=0)) == KVTraffic()
    assert shadow.usage.free_blocks == 6, "what the newest report says"
    assert shadow.observe(report(3, KVTraffic(5, 1, 50, 10, 1, 9))) == KVTraffic(3, 0, 30, 0, 1, 9)
    again = report(1, KVTraffic(1, 0, 10), incarnation="another")
    assert shadow.observe(again) == KVTraffic(1, 0, 10)


def test_replicas_add_up() -> None:
    one = KVUsage(10, 6, 1, 2, 7, 4, 3, KVTraffic(1, 2, 3, 4, 5, 6))
    two = dataclasses.replace(one, free_blocks=1)
    assert total_usage([one, two]) == KVUsage(20, 7, 2, 4, 14, 8, 6, KVTraffic(2, 4, 6, 8, 10, 12))
    assert total_usage([]) == KVUsage()
