"""A worker's cache as its reports tell it: changes until they are acknowledged; where each sequence's KV is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

from farsight.core.errors import IntegrityError
from farsight.core.messages.kv import KVTraffic, KVUsage
from farsight.core.messages.plans import CachedRun, KVCacheEvent, StepReport
from farsight.kvcache.block_manager import NO_PARENT, BlockManager


class CacheJournal:
    """KV cache events of one worker life; every report repeats them until the Scheduler acknowledges them.

    Unacknowledged changes never exceed the cache itself: before they do, one event reports the complete set again.

    Args:
        blocks: The pool whose cache is reported; watched from now on.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        blocks.watch()
        self._seq = 0
        self._waiting: list[tuple[int, KVCacheEvent]] = []  # (first report that holds it, event)
        self._whole_due = True

    def begin_anew(self) -> None:
        """Makes the next report hold the complete set: the receiver is new, or has missed an event."""
        self._whole_due = True

    def notices(self, report_seq: int) -> tuple[KVCacheEvent, ...]:
        """Returns the events of the report of this number."""
        changed = self._blocks.take_changes()
        num_waiting = sum(notice.num_hashes for _, notice in self._waiting)
        if changed is None or num_waiting + len(changed) > self._blocks.num_blocks:
            self._whole_due = True
        if self._whole_due:
            self._waiting.clear()
            self._add(report_seq, KVCacheEvent(self._seq + 1, True, tuple(runs(self._blocks.cached_chain()))))
        elif changed:
            stored = [(name, parent) for name, parent in changed.items() if self._blocks.caches(name)]
            evicted = tuple(name for name in changed if not self._blocks.caches(name))
            self._add(report_seq, KVCacheEvent(self._seq + 1, False, tuple(runs(stored)), evicted))
        self._whole_due = False
        return tuple(notice for _, notice in self._waiting)

    def _add(self, report_seq: int, notice: KVCacheEvent) -> None:
        self._seq = notice.seq
        self._waiting.append((report_seq, notice))

    def acknowledge(self, report_seq: int) -> None:
        """Drops the events of reports up to this one, which the receiver has acknowledged."""
        self._waiting = [(first, notice) for first, notice in self._waiting if first > report_seq]


class CacheMirror:
    """The blocks that a worker caches, according to its KV cache events.

    Attributes:
        seq: Number of the last event that was applied; None before a whole one.
        missed: Whether an event was lost on the way, so that only a whole event helps.
    """

    def __init__(self) -> None:
        self.seq: int | None = None
        self.missed = False
        self._parents: dict[int, int] = {}  # by name, parents before their successors

    def __len__(self) -> int:
        return len(self._parents)

    def take(self, notice: KVCacheEvent) -> bool:
        """Applies an event; returns whether it was new and could be applied."""
        if self.seq is not None and notice.seq <= self.seq:
            return False
        if not notice.whole and (self.seq is None or notice.seq > self.seq + 1):
            self.missed = True
            return False
        if notice.whole:
            self._parents.clear()
            self.missed = False
        self.seq = notice.seq
        parents = self._parents
        for name in notice.evicted:
            parents.pop(name, None)
        for run in notice.stored:
            parent = run.parent
            for name in run.hashes:
                parents.pop(name, None)  # in its new place, behind its parent's
                parents[name] = parent
                parent = name
        return True

    def num_cached(self, hashes: tuple[int, ...]) -> int:
        """Counts the cached blocks at the beginning of a chain. O(log n): predecessors of a cached block are cached."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in self._parents:
                low = middle + 1
            else:
                high = middle
        return low

    def whole(self) -> KVCacheEvent | None:
        """Returns the complete set as one event, with the last event's number; None if the set is not known."""
        if self.seq is None or self.missed:
            return None
        return KVCacheEvent(self.seq, True, tuple(runs(self._parents.items())))

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every name follows its parent."""
        seen = {NO_PARENT}
        for name, parent in self._parents.items():
            if parent not in seen:
                raise IntegrityError(f"{name:x} is cached, its predecessor {parent:x} is not, or comes later")
            seen.add(name)


def runs(chain: Iterable[tuple[int, int]]) -> Iterator[CachedRun]:
    """Joins (name, parent) pairs to runs of blocks that follow each other."""
    first, names = NO_PARENT, list[int]()
    for name, parent in chain:
        if names and names[-1] != parent:
            yield CachedRun(first, tuple(names))
            names = []
        if not names:
            first = parent
        names.append(name)
    if names:
        yield CachedRun(first, tuple(names))


class ResidencyMirror:
    """The KV of one replica."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._report: StepReport | None = None

    def observe(self, report: StepReport) -> KVTraffic:
        """Applies a report; ignores one that is older than the last.

        Returns:
            The moves since the report before it, or since the worker's life began.
        """
        known = self._report
        same_life = known is not None and known.worker_incarnation == report.worker_incarnation
        if known is not None and same_life and report.report_seq <= known.report_seq:
            return KVTraffic()
        self._report = report
        in_tables = sum(progress.num_blocks for progress in report.progress)
        self._num_blocks = report.free_blocks + in_tables - report.shared_blocks
        before = known.traffic if known is not None and same_life else KVTraffic()
        return _since(before, report.traffic)

    @property
    def usage(self) -> KVUsage:
        """Zeros before the first report."""
        report = self._report
        if report is None:
            return KVUsage()
        return KVUsage(
            num_blocks=self._num_blocks,
            free_blocks=report.free_blocks,
            num_resident=sum(progress.num_blocks > 0 for progress in report.progress),
            short_blocks=report.short_blocks,
            num_host_blocks=report.num_host_blocks,
            free_host_blocks=report.free_host_blocks,
            flying_blocks=report.flying_blocks,
            traffic=report.traffic,
        )


def _since(before: KVTraffic, now: KVTraffic) -> KVTraffic:
    return KVTraffic(*(getattr(now, each.name) - getattr(before, each.name) for each in fields(KVTraffic)))


def total_usage(usages: list[KVUsage]) -> KVUsage:
    """Adds the KV usages of several replicas."""
    traffic = KVTraffic(*(sum(getattr(usage.traffic, each.name) for usage in usages) for each in fields(KVTraffic)))
    counts = [each.name for each in fields(KVUsage) if each.name != "traffic"]
    return KVUsage(traffic=traffic, **{name: sum(getattr(usage, name) for usage in usages) for name in counts})
