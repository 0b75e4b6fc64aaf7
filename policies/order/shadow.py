"""What order of arrival would have done on the same server: a shadow of it, and a guard that others are measured by.

The shadow gives its places in order of arrival, and all that have one share each step, as under ``fcfs``: so the tokens
that each of them has got rise alike, and who began at ``v`` ends when they reach ``v`` and its length. A prompt holds
all up for as long as it takes. The shadow goes no further than lengths are known: it waits for the server's end of each
request that has a place in it.

A high quantile of the times from arrival to end is the guard of those who arrive later (Nudge: Grosof, Yang, Scully and
Harchol-Balter, SIGMETRICS 2021, and its guarded variants: an order must not make the tail of arrival order longer).
Lengths are unknown ahead, so that this is a guard and no promise; each end behind its guard is counted.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from farsight.core.costs import StepCost

WINDOW = 1000
"""Latest ends that the quantile is taken of."""

LEVEL = 0.99
LEAST_ENDS = 50
"""With fewer ends there is no guard."""

LOOK_EVERY = 8
"""Ends between two computations of the quantile."""

MAX_OPEN = 4096
"""Most requests in the shadow; with more it is so far behind the server that it begins again."""


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


@dataclass(slots=True)
class _Row:
    """A request of the shadow.

    Attributes:
        began: The tokens that each place had got when it got one; infinite while it waits.
        length, took_s: Its output tokens and its seconds on the server, once it has ended there.
    """

    arrived_at: float
    prompt_len: int
    missing_len: int
    guard_s: float
    began: float = math.inf
    length: int = 0
    took_s: float | None = None


class ShadowFcfs:
    """Order of arrival on a server of ``places``; a call costs O(log requests) for each end in it since the last.

    Attributes:
        guard_s: Seconds after its arrival that a request's guard stands at; infinity while too few have ended.
        tally: What has ended on both.
    """

    def __init__(self, cost: StepCost, places: int) -> None:
        self.guard_s = math.inf
        self.tally = NO_ENDS
        self.cost = cost
        self._places = places
        self._latest: deque[float] = deque(maxlen=WINDOW)
        self._clear()

    def _clear(self) -> None:
        self._now = self._tokens = 0.0
        self._rows: dict[str, _Row] = {}
        self._arrivals: deque[str] = deque()  # that the shadow has not come to
        self._waiting: deque[str] = deque()
        self._ends: list[tuple[float, str]] = []
        self._num_running, self._context_len = 0, 0.0  # the context less the tokens that each of them has got

    def arrived(
        self, request_id: str, prompt_len: int, missing_len: int, now: float, least_guard_s: float = 0.0
    ) -> None:
        """Records an arrival.

        Args:
            missing_len: Prompt tokens to compute.
            least_guard_s: Seconds after which its guard stands at the earliest.
        """
        if len(self._rows) >= MAX_OPEN:
            self._clear()
        self._rows[request_id] = _Row(now, prompt_len, missing_len, max(self.guard_s, least_guard_s))
        self._arrivals.append(request_id)

    def ended(self, request_id: str, output_len: int, took_s: float, now: float) -> None:
        """Takes an end on the server, and counts it once the shadow has it too; unknown ids are ignored."""
        row = self._rows.get(request_id)
        if row is not None:
            row.length, row.took_s = output_len, took_s
            if row.began < math.inf:
                heapq.heappush(self._ends, (row.began + output_len, request_id))
            self._advance(now)

    def left(self, request_id: str) -> None:
        """Forgets a request that leaves without an end."""
        row = self._rows.pop(request_id, None)
        if row is not None and row.began < math.inf:
            self._leave(row)

    def _advance(self, until: float) -> None:
        while len(self._ends) == self._num_running:  # the length of each that has a place is known
            while self._arrivals and self._arrivals[0] not in self._rows:
                self._arrivals.popleft()
            arrives_at = self._rows[self._arrivals[0]].arrived_at if self._arrivals else math.inf
            ends_at, first = self._ends[0] if self._ends else (math.inf, "")
            at = self._now + (ends_at - self._tokens) * self._step_s()
            if min(at, arrives_at) > until:
                return
            if arrives_at < at:
                if arrives_at > self._now:
                    self._tokens += (arrives_at - self._now) / self._step_s() if self._num_running else 0.0
                    self._now = arrives_at
                self._waiting.append(self._arrivals.popleft())
                self._fill()
                continue
            heapq.heappop(self._ends)
            self._tokens, self._now = ends_at, at
            row = self._rows.pop(first)
            self._count(row, at - row.arrived_at)
            self._leave(row)

    def _step_s(self) -> float:
        context_len = self._context_len + self._num_running * self._tokens
        return self.cost.step_s(0, self._num_running, round(context_len))

    def _leave(self, row: _Row) -> None:
        self._num_running -= 1
        self._context_len -= row.prompt_len - row.began
        self._fill()

    def _fill(self) -> None:
        while self._waiting and self._num_running < self._places:
            request_id = self._waiting.popleft()
            row = self._rows.get(request_id)
            if row is None:
                continue
            row.began = self._tokens
            self._num_running += 1
            self._context_len += row.prompt_len - row.began
            self._now += self.cost.prefill_token_s * row.missing_len
            if row.took_s is not None:
                heapq.heappush(self._ends, (row.began + row.length, request_id))

    def _count(self, row: _Row, shadow_s: float) -> None:
        assert row.took_s is not None
        self._latest.append(shadow_s)
        tally = self.tally
        self.tally = GuardTally(
            tally.num_ended + 1,
            tally.num_violations + (row.took_s > row.guard_s),
            tally.earlier_s + max(shadow_s - row.took_s, 0.0),
            tally.later_s + max(row.took_s - shadow_s, 0.0),
        )
        if self.tally.num_ended >= LEAST_ENDS and self.tally.num_ended % LOOK_EVERY == 0:
            self.guard_s = float(np.quantile(np.array(self._latest), LEVEL))
