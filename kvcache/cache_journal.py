"""Changes of a worker's prefix cache, reported until the Scheduler has acknowledged them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from core.errors import IntegrityError
from core.messages.plans import CachedRun, KVCacheEvent
from kvcache.block_manager import NO_PARENT, BlockManager


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
