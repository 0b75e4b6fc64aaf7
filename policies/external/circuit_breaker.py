"""Decides whether requests go to an external server: a circuit breaker (M. Nygard, "Release It!", 2nd ed., chapter 5).

A state machine without clock or I/O. It opens when several requests in a row fail or are slow, and at once on a fault
that waiting does not mend, such as a server that serves another model. After a pause, which doubles each time, one
probe decides whether it closes again; no client's request is risked for that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from farsight.core.errors import IntegrityError


class BreakerState(StrEnum):
    """``CLOSED`` lets requests through; ``HALF_OPEN`` waits for a probe to end, ``OPEN`` until the next one is due."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """
    Attributes:
        max_failures: Failures without a success between them at which the breaker opens. (A share of recent requests
            would take longer to notice a death, the busier the server was before.)
        window_s: Seconds after which a failure no longer counts.
        pause_s: Seconds from opening to the first probe; doubled each time, until a request succeeds, up to
            ``max_pause_s``.
        check_s: Seconds between probes while the breaker is closed, and from an answer to the next probe; ``recheck_s``
            after a probe that failed.
    """

    max_failures: int = 3
    window_s: float = 30.0
    pause_s: float = 1.0
    max_pause_s: float = 30.0
    check_s: float = 5.0
    recheck_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The server has answered a request."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A request failed by the server's fault, or was too slow.

    Attributes:
        trips: Every other request would fail as well: the breaker opens at once.
    """

    reason: str
    trips: bool = False


@dataclass(frozen=True, slots=True)
class ProbePassed:
    """The server answers and serves the expected model."""


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    reason: str
    trips: bool = False


@dataclass(frozen=True, slots=True)
class ProbeBegun:
    """The probe that was due is under way."""


BreakerEvent = Succeeded | Failed | ProbePassed | ProbeFailed | ProbeBegun


class CircuitBreaker:
    """Begins half open: no request goes to a server that has not answered its first probe. ``handle`` alone changes it.

    Attributes:
        reason: Why the breaker is not closed; empty if it is.
        probe_at: Instant of the next probe, in seconds on the caller's clock.
    """

    def __init__(self, rules: BreakerRules | None = None) -> None:
        self.rules = rules or BreakerRules()
        self.state = BreakerState.HALF_OPEN
        self.reason = "not asked yet"
        self.probe_at = 0.0
        self._failed_at: deque[float] = deque()  # since the last success
        self._pause_s = self.rules.pause_s

    @property
    def closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def handle(self, event: BreakerEvent, now: float) -> bool:
        """Applies an event; returns whether the state changed. ``now``: seconds on the caller's clock."""
        before = self.state
        match event:
            case Succeeded():
                self._pause_s = self.rules.pause_s
                self._failed_at.clear()
                if self.closed:  # an answer says more than a probe
                    self.probe_at = max(self.probe_at, now + self.rules.check_s)
            case Failed(reason, trips):
                if self.closed:
                    self._fail(reason, trips, now)
            case ProbeBegun():
                self._begin_probe(now)
            case ProbePassed():
                self._pass_probe(now)
            case ProbeFailed(reason, trips):
                self._fail_probe(reason, trips, now)
        return self.state is not before

    def _begin_probe(self, now: float) -> None:
        if not self.closed:
            self.state = BreakerState.HALF_OPEN
        self.probe_at = now + self.rules.check_s  # until its outcome says more

    def _pass_probe(self, now: float) -> None:
        self.probe_at = now + self.rules.check_s
        if self.closed:
            return
        self.state, self.reason = BreakerState.CLOSED, ""

    def _fail_probe(self, reason: str, trips: bool, now: float) -> None:
        if self.closed:
            self.probe_at = now + self.rules.recheck_s
            self._fail(reason, trips, now)
        else:
            self._open(reason, now)

    def _fail(self, reason: str, trips: bool, now: float) -> None:
        self._failed_at.append(now)
        while self._failed_at[0] < now - self.rules.window_s:
            self._failed_at.popleft()
        if trips or len(self._failed_at) >= self.rules.max_failures:
            self._open(reason, now)

    def _open(self, reason: str, now: float) -> None:
        self.state, self.reason = BreakerState.OPEN, reason
        self._failed_at.clear()
        self.probe_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, self.rules.max_pause_s)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the failures, the reason and the pause agree with the state."""
        if len(self._failed_at) >= (self.rules.max_failures if self.closed else 1):
            raise IntegrityError(f"the breaker is {self.state} at {len(self._failed_at)} failures")
        if self.closed == bool(self.reason):
            raise IntegrityError(f"the breaker is {self.state} for the reason {self.reason!r}")
        if not self.rules.pause_s <= self._pause_s <= self.rules.max_pause_s:
            raise IntegrityError(f"the next pause would be {self._pause_s} s")
