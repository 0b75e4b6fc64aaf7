"""Finds the place in a JSON Schema that is the reason why it cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_TRIED = 128
"""Subschemas that are compiled in search of the place."""

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


def find_place(schema: Any, problem: Callable[[Any], str]) -> tuple[str, str]:
    """The innermost subschema that cannot be compiled, and why.

    Args:
        problem: Why a schema cannot be compiled; empty if it can.

    Returns:
        A JSON pointer (RFC 6901; empty for the schema itself) and the reason.
    """
    place, reason = "", problem(schema)
    shared = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema}
    left = MAX_TRIED
    inner = list(_subschemas(schema))
    while inner and left > 0:
        step, each = inner.pop(0)
        left -= 1
        found = problem({**shared, **each} if isinstance(each, dict) else each)
        if found and not _repeats_shared(found, shared, problem):
            place, reason, inner = place + step, found, list(_subschemas(each))
    return place, reason


def _repeats_shared(found: str, shared: Mapping[str, Any], problem: Callable[[Any], str]) -> bool:
    """Whether the shared definitions alone give the same reason."""
    return bool(shared) and problem(dict(shared)) == found


def _subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Each with its step of a JSON pointer."""
    if not isinstance(schema, dict):
        return
    for key in _BY_NAME:
        found = schema.get(key)
        for name, each in found.items() if isinstance(found, dict) else ():
            yield f"/{key}/{escaped(name)}", each
    for key in _IN_LIST:
        found = schema.get(key)
        for index, each in enumerate(found) if isinstance(found, list) else ():
            yield f"/{key}/{index}", each
    for key in _SINGLE:
        if isinstance(schema.get(key), dict):
            yield f"/{key}", schema[key]


def escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
