"""Whether requests go to another server: a circuit breaker (M. Nygard, "Release It!", 2nd edition, chapter 5).

A state machine without clock or I/O. It opens when several requests in a row fail or are slow, or at once on what no
waiting will mend, such as a server of another model; after a pause, twice as long each time, one probe decides whether
it closes again. No client's request is risked for that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from core.errors import IntegrityError


class BreakerState(StrEnum):
    """``CLOSED`` lets requests through; ``HALF_OPEN`` waits for a probe to end, ``OPEN`` for the time of the next."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """
    Attributes:
        max_failures: It opens at so many failures without a success between them. (A share of what ended lately would
            take as long to see a death as the server was busy before.)
        window_s: Those before so many seconds do not count.
        pause_s: From opening to the first probe; doubled each time, until a request succeeds, up to ``max_pause_s``.
        check_s: While it is closed a probe is due so often, and ``recheck_s`` after one that failed.
    """

    max_failures: int = 3
    window_s: float = 30.0
    pause_s: float = 1.0
    max_pause_s: float = 30.0
    check_s: float = 5.0
    recheck_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Succeeded:
    """A request has its answer."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A request failed by the server's fault, or was too slow.

    Attributes:
        trips: It would go on failing: no use in trying others.
    """

    reason: str
    trips: bool = False


@dataclass(frozen=True, slots=True)
class ProbePassed:
    """The server answers, and serves what it should."""


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    reason: str
    trips: bool = False


@dataclass(frozen=True, slots=True)
class ProbeBegun:
    """The probe that was due is under way."""


BreakerEvent = Succeeded | Failed | ProbePassed | ProbeFailed | ProbeBegun


class CircuitBreaker:
    """Begins half open: nothing goes to a server that has not answered its first probe.

    Attributes:
        reason: Why it is not closed; empty if it is.
        probe_at: When the next probe is due, in seconds on the caller's clock.
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
        """The only mutator; whether the state is another one now. ``now`` in seconds on the caller's clock."""
        before = self.state
        match event:
            case Succeeded():
                self._pause_s = self.rules.pause_s
                self._failed_at.clear()
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
