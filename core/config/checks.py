"""The check that every configuration class makes of its values."""

from __future__ import annotations

from core.errors import ConfigError


def require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(name, value, expected)
