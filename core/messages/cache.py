"""Messages about prefix caches, and about requests that have found blocks there (see ``core.messages``).

A worker numbers its KV cache events from 1 on within its life. Each says how the set of cached blocks has changed since
the event before it; a ``whole`` event holds the complete set instead, and replaces lost events.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CachedRun:
    """Cached blocks that follow each other, by their chained hashes (``kvcache.block_manager``).

    Attributes:
        parent: Hash of the block before the first of them, cached as well; 0 if the first begins a sequence.
    """

    parent: int
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVCacheEvent:
    """Worker -> Scheduler -> Router: blocks that a worker's prefix cache has stored and evicted.

    Attributes:
        seq: Rises by one with each event within a worker's life.
        whole: ``stored`` is the complete set, whatever earlier events said.
        stored: Parents before their successors. Blocks that were stored before may be named again.
        evicted: Hashes, successors before their predecessors; no successor of an evicted block stays cached.
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
    """Scheduler -> Router: all blocks that the worker caches, as a ``whole`` event; None if that is not known."""

    worker_incarnation: str
    notice: KVCacheEvent | None


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """An attempt has run for the first time.

    Attributes:
        cached_len: Prompt tokens that the replica found cached.
        queue_s: Seconds that it waited there.
    """

    request_id: str
    attempt: int
    cached_len: int
    queue_s: float
