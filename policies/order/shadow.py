"""What order of arrival would have done on the same server: a shadow of it, and a guard that others are measured by.

The work that waits on a server is the same under every order that never idles, so the unfinished work that a request
finds, and its own stay, say when order of arrival would have ended it. A high quantile of these times, counted from a
request's arrival, is its guard (Nudge: Grosof, Yang, Scully and Harchol-Balter, SIGMETRICS 2021, and its guarded
variants: an order must not make the tail of arrival order longer). Lengths are unknown ahead, so that this is a guard
and no promise; each end behind its guard is counted.

The shadow serves one after the other. Order of arrival on many places shares the replica: its short requests end
earlier than in the shadow, its long ones later, so the seconds beside the shadow are not those beside such a server.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

WINDOW = 1000
"""Latest arrivals that the quantile is taken of."""

LEVEL = 0.99
LEAST_ARRIVALS = 50
"""With fewer arrivals there is no guard."""

LOOK_EVERY = 8
"""Arrivals between two computations of the quantile."""


@dataclass(frozen=True, slots=True)
class GuardTally:
    """Ends beside those of the shadow so far.

    Attributes:
        num_ended: Requests that have ended.
        num_violations: Those of them that ended behind their guards.
        earlier_s, later_s: Seconds by which ends came before, and after, those of the shadow; sums.
    """

    num_ended: int = 0
    num_violations: int = 0
    earlier_s: float = 0.0
    later_s: float = 0.0


NO_ENDS = GuardTally()
"""Before any has ended."""


class ShadowFcfs:
    """Times of arrival order, from the work that each request finds.

    Attributes:
        guard_s: Seconds after its arrival that a request's guard stands at; infinity while too few have come.
    """

    def __init__(self) -> None:
        self.guard_s = math.inf
        self.tally = NO_ENDS
        self._latest: deque[float] = deque(maxlen=WINDOW)
        self._num_arrived = 0
        self._open: dict[str, tuple[float, float]] = {}  # seconds of the shadow, and the guard as it stood

    def arrived(self, request_id: str, found_s: float, stay_s: float) -> None:
        """Records an arrival.

        Args:
            found_s: Unfinished work before it, in seconds of the replica.
            stay_s: Seconds from its first step to its end.
        """
        self._latest.append(found_s + stay_s)
        self._num_arrived += 1
        if self._num_arrived >= LEAST_ARRIVALS and self._num_arrived % LOOK_EVERY == 0:
            self.guard_s = float(np.quantile(np.array(self._latest), LEVEL))
        self._open[request_id] = found_s + stay_s, self.guard_s

    def ended(self, request_id: str, took_s: float) -> None:
        """Counts an end; unknown ids are ignored."""
        told = self._open.pop(request_id, None)
        if told is None:
            return
        shadow_s, guard_s = told
        tally = self.tally
        self.tally = GuardTally(
            tally.num_ended + 1,
            tally.num_violations + (took_s > guard_s),
            tally.earlier_s + max(shadow_s - took_s, 0.0),
            tally.later_s + max(took_s - shadow_s, 0.0),
        )

    def left(self, request_id: str) -> None:
        """Forgets a request that leaves without an end."""
        self._open.pop(request_id, None)
