"""How often requests were placed for which reason, and the last placements: what a dashboard shows of them."""

from __future__ import annotations

from collections import Counter, deque

from core.messages.placement import ReasonCount, RecentPlacement
from core.request import Request
from policies.placement.base import Choice

NUM_RECENT = 20


class PlacementStats:
    """Bounded: counts by reason, of which there are few, and the last ``NUM_RECENT``."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._recent: deque[RecentPlacement] = deque(maxlen=NUM_RECENT)

    def add(self, request: Request, choice: Choice, placed_at: float) -> None:
        """A request was placed, at so many seconds since the epoch."""
        self._counts[choice.reason] += 1
        self._recent.appendleft(
            RecentPlacement(placed_at, choice.replica, choice.reason, request.known_len, choice.hit_len)
        )

    def reasons(self) -> tuple[ReasonCount, ...]:
        """The commonest first."""
        return tuple(ReasonCount(*each) for each in self._counts.most_common())

    def recent(self) -> tuple[RecentPlacement, ...]:
        """The newest first."""
        return tuple(self._recent)
