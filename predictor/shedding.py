"""A limit on the cost of forecasts: encoding a text takes milliseconds of a processor that also serves."""

from __future__ import annotations

from enum import IntEnum

from farsight.core.errors import InvalidValueError

_SMOOTHING = 0.1
"""Weight of the newest measurement in a level's cost: ten batches change it by two thirds."""


class Effort(IntEnum):
    """Inputs of a forecast, cheapest first."""

    HISTORY = 0
    """The last outputs, whatever the request."""
    LENGTH = 1
    """The input's length and the instruction's embedding, if that is cached."""
    FULL = 2
    """Also the input's text, which must be encoded."""


class EffortBudget:
    """Lets forecasts use a share of one processor: seconds are saved up as time passes, and forecasts spend them.

    Not safe for several threads at once.

    Args:
        share: Seconds of work for a second, above 0; 0.25 is a quarter of a processor.
        burst_s: Seconds that can be saved up, above 0.
        full_s: Cost of a full forecast in seconds, before measurements move it.
        length_s: The same for a forecast from the input's length.

    Raises:
        InvalidValueError: a number that is not above 0.
    """

    def __init__(self, share: float, burst_s: float = 1.0, full_s: float = 0.02, length_s: float = 0.001) -> None:
        for name, value in (("share", share), ("burst_s", burst_s), ("full_s", full_s), ("length_s", length_s)):
            if not 0 < value < float("inf"):
                raise InvalidValueError(name, value, "a finite number above 0")
        self._share = share
        self._burst_s = burst_s
        self._cost_s = {Effort.FULL: full_s, Effort.LENGTH: length_s}
        self._saved_s = burst_s
        self._at: float | None = None

    def cost_s(self, effort: Effort) -> float:
        """Returns the recent cost of one question, in seconds; 0 for ``HISTORY``."""
        return self._cost_s.get(effort, 0.0)

    def choose(self, now: float, num_questions: int = 1) -> Effort:
        """Returns the highest effort that the saved seconds pay for.

        A batch that costs more than half of what can be saved up goes ahead with half of it, and leaves a debt.

        Args:
            now: Seconds, not before those of the last call.
            num_questions: Questions that are answered together.
        """
        if self._at is not None:
            self._saved_s = min(self._saved_s + self._share * max(now - self._at, 0.0), self._burst_s)
        self._at = now
        for effort in (Effort.FULL, Effort.LENGTH):
            if self._saved_s >= min(self._cost_s[effort] * num_questions, self._burst_s / 2):
                return effort
        return Effort.HISTORY

    def spend(self, effort: Effort, seconds: float, num_questions: int = 1) -> None:
        """Books the measured cost of a batch; more than was saved becomes a debt that is paid first."""
        if effort is Effort.HISTORY or num_questions < 1:
            return
        self._saved_s -= seconds
        self._cost_s[effort] += _SMOOTHING * (seconds / num_questions - self._cost_s[effort])
