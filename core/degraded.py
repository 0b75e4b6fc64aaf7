"""Why a component that still works does so less well than it should: the log cannot be written, forecasts are shed."""

from __future__ import annotations

import math
from collections.abc import Iterator

LOG_READ = "log_read"
LOG_WRITE = "log_write"
RECORDS_WAIT = "records_wait"
RECORDS_LOST = "records_lost"
FORECASTS_SHED = "forecasts_shed"
FORECASTS_FAIL = "forecasts_fail"

SHED_SHOWN_S = 10.0
"""How long the status says that a forecast was left out, or made with less than all features."""

MAX_REASON = 300
"""Longest text of a cause; it may quote another program."""


class Degraded:
    """The causes of one component, each under a name that programs can test. Knows no clock."""

    def __init__(self) -> None:
        self._causes: dict[str, tuple[str, float]] = {}

    def note(self, cause: str, reason: str, now: float = 0.0, lasts_s: float = math.inf) -> None:
        """Records a cause, which holds from now on.

        Args:
            cause: One of the names above.
            reason: For people: what is wrong, and what follows.
            now: Seconds; needed with ``lasts_s``.
            lasts_s: Seconds after which the cause ends, for causes that show in single events; else ``clear`` ends it.
        """
        self._causes[cause] = (reason[:MAX_REASON], now + lasts_s)

    def clear(self, cause: str) -> None:
        """Ends a cause; does nothing if it was never noted."""
        if cause in self._causes:
            self._causes[cause] = ("", -math.inf)

    def reason(self, now: float) -> str:
        """Returns the reasons of all causes that hold, as one line; empty if none holds."""
        return "; ".join(reason for reason, until in self._causes.values() if now < until)

    def causes(self, now: float) -> Iterator[tuple[str, bool]]:
        """Yields every cause that was ever noted, and whether it holds."""
        return ((cause, now < until) for cause, (_, until) in self._causes.items())
