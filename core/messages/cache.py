"""What is said about prefix caches, and about requests that have found something there (see ``core.messages``).

A worker numbers its notices from 1 on within its life. Each says by how much the set of cached blocks has changed since
the one before it; a ``whole`` one says all of it instead, and mends whatever was lost before.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CachedRun:
    """Cached blocks that follow each other, by their chained hashes (``kvcache.prefix``).

    Attributes:
        parent: Hash of the block before the first of them, cached as well; 0 if the first begins a sequence.
    """

    parent: int
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVCacheEvent:
    """Worker -> Scheduler -> Router: what a worker's prefix cache has got and lost, in blocks.

    Attributes:
        seq: Rises by one a notice within a worker's life.
        whole: ``stored`` is all that is cached, whatever was said before.
        stored: Parents before those that follow them. What was stored before may be named again.
        evicted: Hashes, successors before their predecessors; nothing that follows one of them is cached any more.
    """

    seq: int
    whole: bool
    stored: tuple[CachedRun, ...] = ()
    evicted: tuple[int, ...] = ()

    @property
    def num_hashes(self) -> int:
        return len(self.evicted) + sum(len(run.hashes) for run in self.stored)


@dataclass(frozen=True, slots=True)
class CacheReply:
    """Scheduler -> Router: all that the worker caches, a ``whole`` notice; None if that is not known."""

    worker_incarnation: str
    notice: KVCacheEvent | None


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """An attempt has run for the first time.

    Attributes:
        cached_len: Prompt tokens that the replica found cached.
        queue_s: How long it waited there.
    """

    request_id: str
    attempt: int
    cached_len: int
    queue_s: float
