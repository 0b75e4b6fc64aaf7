"""How much of its prompt each request of a replica would find cached, kept up to date as the cache changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

from core.errors import IntegrityError
from core.messages.cache import KVCacheEvent
from kvcache.cache_journal import CacheMirror
from kvcache.prefix import NO_PARENT
from policies.job import Job, ScheduledRequest

LOOK_UPS = 64
"""Requests looked up at one report at most: about half a millisecond. Of more that a change concerns, the oldest come
first."""

_Boundary = tuple[int, int]
"""The last cached block of a prompt and the first that is not; ``NO_PARENT`` where there is none."""


class ReplicaHits:
    """Looks up only those whose prompt's cached part may have grown or shrunk.

    Who is cached has its predecessors. So the cached part of a prompt changes only if its last block is evicted or the
    first block after it is stored: requests are found by these two. A report costs O(what it tells + ``LOOK_UPS``).

    Args:
        cache: What the worker caches.
        changed: Told of each job whose hits have changed.
        block_size: Of the worker's.
    """

    def __init__(self, cache: CacheMirror, changed: Callable[[Job], None], block_size: int = 1) -> None:
        self._cache = cache
        self._changed = changed
        self._block_size = block_size
        self._boundaries: dict[str, _Boundary] = {}
        self._by_last: dict[int, dict[str, ScheduledRequest]] = {}
        self._by_next: dict[int, dict[str, ScheduledRequest]] = {}
        self._due: dict[str, ScheduledRequest] = {}
        self._reported: dict[str, ScheduledRequest] = {}  # looked up when they wait again

    @property
    def num_due(self) -> int:
        """Requests to be looked up at the next reports."""
        return len(self._due)

    def add(self, scheduled: ScheduledRequest) -> None:
        """A request has come: it is looked up, if the cache is known."""
        if self._cache.seq is not None:
            self._look_up(scheduled)

    def remove(self, request_id: str) -> None:
        """A request is gone; unknown ones are fine."""
        self._due.pop(request_id, None)
        self._reported.pop(request_id, None)
        self._take_out(request_id)

    def reported(self, scheduled: ScheduledRequest) -> None:
        """The worker has said what this one found."""
        self._reported[scheduled.request_id] = scheduled

    def take(self, notices: Iterable[KVCacheEvent], everyone: Mapping[str, ScheduledRequest]) -> list[KVCacheEvent]:
        """Those notices that are news; looks up whom they concern.

        Args:
            everyone: All requests by id, the oldest first.
        """
        news = [notice for notice in notices if self._cache.take(notice)]
        for notice in news:
            if notice.whole:
                self._due = dict(everyone)
                continue
            for name in notice.evicted:
                self._due.update(self._by_last.get(name, {}))
            for run in notice.stored:
                for name in run.hashes:
                    self._due.update(self._by_next.get(name, {}))
        if news:
            self._due.update((rid, each) for rid, each in self._reported.items() if not each.num_blocks)
        for request_id in list(itertools.islice(self._due, LOOK_UPS)):
            self._look_up(self._due.pop(request_id))
        return news

    def _look_up(self, scheduled: ScheduledRequest) -> None:
        """At least one token of a prompt is always computed."""
        hashes, job, size = scheduled.request.prefix_hashes, scheduled, self._block_size
        if len(hashes) != job.prompt_len // size:
            return
        num_cached = self._cache.num_cached(hashes)
        self._put(scheduled, _boundary(hashes, num_cached))
        if scheduled.num_blocks:  # what it found has been said
            self._reported[job.request_id] = scheduled
            return
        self._reported.pop(job.request_id, None)
        cached_len = min(num_cached, (job.prompt_len - 1) // size) * size
        if cached_len != job.cached_len:
            job.cached_len, scheduled.told = cached_len, None
            self._changed(job)

    def _put(self, scheduled: ScheduledRequest, boundary: _Boundary) -> None:
        request_id = scheduled.request_id
        if self._boundaries.get(request_id) == boundary:
            return
        self._take_out(request_id)
        self._boundaries[request_id] = boundary
        for table, name in zip((self._by_last, self._by_next), boundary, strict=True):
            if name != NO_PARENT:
                table.setdefault(name, {})[request_id] = scheduled

    def _take_out(self, request_id: str) -> None:
        boundary = self._boundaries.pop(request_id, None)
        if boundary is None:
            return
        for table, name in zip((self._by_last, self._by_next), boundary, strict=True):
            if name != NO_PARENT:
                del table[name][request_id]
                if not table[name]:
                    del table[name]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless everybody who is not due is where the cache says."""
        for request_id, boundary in self._boundaries.items():
            for table, name in zip((self._by_last, self._by_next), boundary, strict=True):
                if name != NO_PARENT and request_id not in table.get(name, {}):
                    raise IntegrityError(f"{request_id} is not found by the end of its cached part")
        for table in (self._by_last, self._by_next):
            for waiting in table.values():
                for request_id, scheduled in waiting.items():
                    hashes = scheduled.request.prefix_hashes
                    actual = _boundary(hashes, self._cache.num_cached(hashes))
                    if request_id not in self._due and self._boundaries[request_id] != actual:
                        raise IntegrityError(f"{request_id}: its cached part has changed and nobody has looked")


def _boundary(hashes: tuple[int, ...], num_cached: int) -> _Boundary:
    last = hashes[num_cached - 1] if num_cached else NO_PARENT
    return last, hashes[num_cached] if num_cached < len(hashes) else NO_PARENT
