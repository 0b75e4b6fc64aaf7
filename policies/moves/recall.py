"""Which waiting requests are recalled from a replica, to be placed again.

A request that no plan has named yet costs nothing to move but its place in a queue and what its replica caches of it.
So it is recalled once it has waited for as long as computing that again would take: whatever would have come then, it
loses at most twice the time of the better choice. A draining replica gives back all that waits there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from farsight.core.costs import StepCost
from farsight.core.messages.requests import Key

LOOK_S = 0.25
"""Seconds between two looks."""

WAIT_S = 0.5
"""Fewest seconds that a request waits before it is recalled: a replica reports a start within a tenth of them."""

FILL_SHARE = 0.95
"""A replica has room for a request while the predicted tokens of its requests stay within this share of its memory."""

MAX_RECALLS = 3
"""Most recalls of one attempt, but for drains."""

ANSWER_S = 1.0
"""Seconds after a recall in which no one asks the replica whether it has the request: the answer may be on its way."""

ASK_AGAIN_S = 3.0
"""Seconds after which a replica is asked again for a request that it has not given back. Longer than ``ANSWER_S`` by
two states of a replica, which come every second: a request that was lost there is found in between."""


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that has been placed and has not run.

    Attributes:
        since: Instant when it was placed.
        tokens: Tokens that it will hold at its predicted end.
        hit_len: Tokens believed to be cached on its replica.
        num_recalls: How often it was recalled before.
        asked_at: Instant when its replica was last asked for it.
    """

    key: Key
    since: float
    tokens: float
    hit_len: int = 0
    num_recalls: int = 0
    asked_at: float = -math.inf


@dataclass(slots=True)
class Crowd:
    """A replica of our own engine, and what waits on it.

    Attributes:
        model_version: Requests go only to replicas with the same weights.
        tokens: Tokens that its requests will hold at their predicted ends.
        capacity_tokens: Tokens that its memory holds.
        is_crowded: Whether anything waits there.
        waiting: What waits there, the oldest first, where it is listed.
    """

    name: str
    model_version: int
    takes: bool
    draining: bool
    num_requests: int
    tokens: float
    capacity_tokens: int
    is_crowded: bool = False
    waiting: list[WaitingRequest] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Recalled:
    """Requests to be recalled from a replica; ``reason`` is drain or starved head."""

    replica: str
    keys: tuple[Key, ...]
    reason: str


class RecallRule:
    """Matches replicas on which requests wait with replicas where they could run at once.

    Args:
        places: Most requests that a replica runs at once.
        wait_s: As ``WAIT_S``.
    """

    def __init__(self, places: int, wait_s: float = WAIT_S) -> None:
        self._places, self._wait_s = places, wait_s

    def has_room(self, crowd: Crowd, tokens: float) -> bool:
        """Returns whether a request of so many tokens could run there at once."""
        fits = crowd.tokens + tokens <= FILL_SHARE * crowd.capacity_tokens
        return crowd.takes and not crowd.is_crowded and crowd.num_requests < self._places and fits

    def choose(self, crowds: Iterable[Crowd], cost: StepCost | None, now: float) -> list[Recalled]:
        """Returns what is to be recalled, draining replicas first, then the replica with the longest wait.

        The room of ``crowds`` is used up by it.

        Args:
            cost: The cost of a step; None before any was measured.
        """
        crowds = list(crowds)
        givers = [each for each in crowds if each.waiting]
        givers.sort(key=lambda each: (not each.draining, each.waiting[0].since))
        out = []
        for giver in givers:
            waiting = [each for each in giver.waiting if now - each.asked_at >= ASK_AGAIN_S]
            others = [each for each in crowds if each.takes and each.model_version == giver.model_version]
            if not giver.draining:
                waiting = [each for each in waiting if self._goes(each, others, cost, now)]
            if waiting and others:
                keys = tuple(each.key for each in waiting)
                out.append(Recalled(giver.name, keys, "drain" if giver.draining else "starved head"))
        return out

    def _goes(self, request: WaitingRequest, others: list[Crowd], cost: StepCost | None, now: float) -> bool:
        """Returns whether a request is recalled, and books it where there is room for it."""
        again_s = 0.0 if cost is None or not request.hit_len else cost.prefill_s(request.hit_len)
        if now - request.since < self._wait_s + again_s or request.num_recalls >= MAX_RECALLS:
            return False
        rooms = [each for each in others if self.has_room(each, request.tokens)]
        if not rooms:
            return False
        taker = min(rooms, key=lambda each: each.num_requests)
        taker.num_requests += 1
        taker.tokens += request.tokens
        return True
