"""Errors that say which field was wrong, what it held and what would be right; the check that raises them."""

from __future__ import annotations

from typing import Any


class FarsightError(Exception):
    """Base of every error that Farsight raises on purpose."""


class InvalidValueError(FarsightError):
    """A value from outside (request, configuration, message) that cannot be used.

    Args:
        field: Dotted name of the offending field, as its sender knows it.
        value: The value found there.
        expected: What would be right, as a phrase that completes "expected ...".
    """

    def __init__(self, field: str, value: Any, expected: str) -> None:
        self.field = field
        self.value = value
        self.expected = expected
        super().__init__(f"{field}: got {_short(value)}, expected {expected}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the error by its constructor's arguments, so that it crosses process boundaries."""
        return type(self), (self.field, self.value, self.expected)


class ConfigError(InvalidValueError):
    """A setting from a file or the command line that cannot be used."""


class MessageError(InvalidValueError):
    """A wire message that is unknown, of another schema version or malformed."""


class CapacityError(FarsightError):
    """The service is full; the same request may succeed later.

    Args:
        message: What is full, with the numbers.
        retry_after_s: Seconds after which a retry makes sense.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.retry_after_s)


class IntegrityError(FarsightError):
    """An invariant of a state machine does not hold: a defect in Farsight itself."""


def _short(value: Any, limit: int = 200) -> str:
    """Shortens a long value: an error shows a whole path, but not a whole prompt."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class RankLost(FarsightError):
    """A process of a replica is gone, or out of step with the others: the replica ends as a whole."""


class WorkerBroken(FarsightError):
    """A model worker cannot go on: its device is lost, or its steps fail one after the other. The worker ends, and its
    requests are resumed elsewhere."""


def require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(name, value, expected)
