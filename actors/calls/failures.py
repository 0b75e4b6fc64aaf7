"""Exceptions on the sockets between components: a record ``[code, text, fields]`` of plain values, never a pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farsight.core.errors import (
    CapacityError,
    ConfigError,
    FarsightError,
    IntegrityError,
    InvalidValueError,
    MessageError,
    RankLost,
    WorkerBroken,
)

MAX_TEXT = 16_384
"""Most characters of an exception's text that are sent; the rest is cut off."""

MAX_VALUE = 200
"""Most characters of a refused value that are sent; as many as the error's text shows."""

Record = list[Any]


class RemoteError(Exception):
    """Stands for an exception of a component whose type is not in the table: a defect of that component.

    Args:
        kind: Name of the exception's type in that component.
        text: Text of the exception.
    """

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {text}")


class _Shown:
    """Stands for a value that was not sent, only its text; has the same ``repr``."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class PeerLost(FarsightError):
    """The component's process has ended or has not started; whether it received the message is unknown."""


_KINDS: dict[str, type[Exception]] = {
    "farsight": FarsightError,
    "integrity": IntegrityError,
    "rank_lost": RankLost,
    "worker_broken": WorkerBroken,
    "capacity": CapacityError,
    "invalid": InvalidValueError,
    "config": ConfigError,
    "message": MessageError,
    "timeout": TimeoutError,
    "peer_lost": PeerLost,
}
_CODES: dict[type[Exception], str] = {kind: code for code, kind in _KINDS.items()}
_UNKNOWN = "unknown"


def write_failure(error: Exception) -> Record:
    """Encodes an exception for the caller. A type that is not in the table is sent as its nearest base that is."""
    code = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), _UNKNOWN)
    text, fields = _clean(str(error))[:MAX_TEXT], list[Any]()
    if isinstance(error, CapacityError):
        fields = [float(error.retry_after_s)]
    elif isinstance(error, InvalidValueError):
        text, fields = _clean(error.expected)[:MAX_TEXT], [_clean(error.field), *_value(error.value)]
    elif code == _UNKNOWN:
        fields = [type(error).__name__]
    return [code, text, fields]


def _value(value: Any) -> tuple[bool, Any]:
    """Returns (True, the value) if the value can be sent as it is, else (False, its text)."""
    plain = value is None or type(value) in (bool, float) or (type(value) is int and -(2**63) <= value < 2**64)
    if plain or (type(value) is bytes and len(value) <= MAX_VALUE):
        return True, value
    if type(value) is str and len(value) <= MAX_VALUE and value == _clean(value):
        return True, value
    shown = _clean(repr(value))
    return False, shown if len(shown) <= MAX_VALUE else f"{shown[: MAX_VALUE - 3]}..."


def _clean(text: str) -> str:
    """Replaces lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def read_failure(record: Any) -> Exception:
    """Returns the exception that a record encodes; a malformed record gives a ``RemoteError``."""
    try:
        code, text, fields = record
        if type(code) is not str or type(text) is not str:
            raise TypeError("a code and a text")
        return _made(code, text, fields)
    except (TypeError, ValueError) as error:
        return RemoteError("malformed failure", f"{record!r:.{MAX_VALUE}} ({error})")


def _made(code: str, text: str, fields: Any) -> Exception:
    kind: Callable[..., Exception] | None = _KINDS.get(code)
    if code == _UNKNOWN or kind is None:
        (name,) = fields if code == _UNKNOWN else (code,)
        return RemoteError(str(name), text)
    if kind is CapacityError:
        (retry_after_s,) = fields
        return CapacityError(text, float(retry_after_s))
    if code in ("invalid", "config", "message"):
        field, crossed, value = fields
        return kind(str(field), value if crossed else _Shown(str(value)), text)
    return kind(text)
