"""Puts the notices of prefix caches in order before a placement hears of them, and asks where one was lost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from core.messages.plans import KVCacheEvent, WorkerReady
from policies.fleet.events import AskCache
from policies.placement.base import Placement

ASK_AGAIN_S = 1.0
"""Seconds after which a replica that has not told what it caches is asked again."""


@dataclass(slots=True)
class _Feed:
    """The notices of a replica's worker life.

    Attributes:
        seq: Number of the last notice; None until the life has told all that it caches, and once a notice was lost.
        asked_at: Instant when the replica was last asked for all that it caches.
    """

    ready: WorkerReady
    seq: int | None = None
    asked_at: float = -math.inf


class CacheNotices:
    """Hands each notice to the placement once and in order."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._feeds: dict[str, _Feed] = {}

    def bring_up(self, name: str, ready: WorkerReady, seq: int, now: float) -> list[AskCache]:
        """Registers a replica that takes requests and has sent notices up to ``seq``; asks for missing ones."""
        feed = self._feeds.get(name)
        if feed is None or feed.ready.worker_incarnation != ready.worker_incarnation:
            feed = self._feeds[name] = _Feed(ready)
        feed.ready = ready
        if feed.seq is not None and feed.seq < seq:
            feed.seq = None  # the last one was lost
        return self._ask(name, feed, now)

    def drop(self, name: str) -> None:
        """Forgets a replica that will not come back."""
        self._feeds.pop(name, None)

    def take(self, name: str, incarnation: str, notices: Iterable[KVCacheEvent], now: float) -> list[AskCache]:
        """Hands each notice to the placement once and in order; if one is missing, asks for all that is cached."""
        feed = self._feeds.get(name)
        if feed is None or feed.ready.worker_incarnation != incarnation or not self._is_used(feed.ready):
            return []  # notices of a life that is over, with all that it cached, or of no use
        for notice in notices:
            if feed.seq is not None and notice.seq <= feed.seq:
                continue  # a duplicate, or an answer that later notices have overtaken
            if not notice.whole and (feed.seq is None or notice.seq > feed.seq + 1):
                feed.seq = None
                continue
            feed.seq = notice.seq
            self._placement.noticed(name, notice)
        return self._ask(name, feed, now)

    def _is_used(self, ready: WorkerReady) -> bool:
        """Returns whether the placement can use notices of this life: the blocks must have the placement's size."""
        return not ready.external and ready.block_size == self._placement.block_size

    def _ask(self, name: str, feed: _Feed, now: float) -> list[AskCache]:
        if feed.seq is not None or now < feed.asked_at + ASK_AGAIN_S or not self._is_used(feed.ready):
            return []
        feed.asked_at = now
        return [AskCache(name)]
