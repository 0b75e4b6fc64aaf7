"""When to learn, and from what: the rules that all continuous learning shares (Magnus III-B, III-D)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from farsight.core.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """Which outcomes are worth learning from: outcomes predicted badly, in absolute and in relative terms.

    Attributes:
        min_error: The error must exceed this, in the unit of the prediction.
        min_share: The error must also exceed this share of the true value.
    """

    min_error: float
    min_share: float

    def __post_init__(self) -> None:
        for name in ("min_error", "min_share"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InvalidValueError(name, value, "a number >= 0")

    def is_wrong(self, predicted: float, actual: float) -> bool:
        """Returns whether the prediction was bad enough to learn from; both limits are exclusive."""
        error = abs(predicted - actual)
        return error > self.min_error and error > self.min_share * actual


class Schedule:
    """Says when something is due that happens every ``period_s`` seconds; the caller passes the time.

    Args:
        period_s: Seconds, above 0.
    """

    def __init__(self, period_s: float) -> None:
        if not 0 < period_s < math.inf:
            raise InvalidValueError("period_s", period_s, "seconds above 0")
        self._period_s = period_s
        self._began_at: float | None = None

    def claim(self, now: float) -> bool:
        """Returns whether a period is over; if so, the next one begins now. The first call begins the first period."""
        if self._began_at is None:
            self._began_at = now
        if now - self._began_at < self._period_s:
            return False
        self._began_at = now
        return True
