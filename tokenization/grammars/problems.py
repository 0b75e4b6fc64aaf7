"""Why a grammar cannot be used: the error, the place in a JSON Schema, and the reason in a client's words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class GrammarRefused(ValueError):
    """A grammar that cannot be used.

    Attributes:
        reason: What is wrong.
        place: JSON pointer into the schema, where that is known; empty for the whole.
    """

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{reason} (at {place})" if place else reason)
        self.reason = reason
        self.place = place


_MAX_CHARS = 500

_WORDS = (
    (r"\n<(?:state|non-verbose)[\s\S]*", ""),
    (r"Unimplemented keys: \[(.*?)\]", r"these keywords cannot be followed: \1"),
    (
        r"oneOf constraints are not supported\. Enable .*",
        "oneOf can be followed where no value follows two of its options, as their types, values, bounds or required"
        " properties show; write anyOf if an output may follow several",
    ),
    (r"Expected f64 for", "Expected a number for"),
    (
        r"Resource '(?:json-schema:///)?(.*?)' is not present in a registry.*",
        r"the reference leads to '\1', which is not in the schema: other documents are not fetched",
    ),
    (
        r"circular references with sibling keys are not supported: (?:json-schema:///)?(.*)",
        r"a reference that leads to itself cannot have other keywords beside it: \1",
    ),
    (
        r"Value for 'multipleOf' has too many digits: .*|invalid multiple of",
        "multipleOf can be followed if it is above 0, at most 4294967295, and has few decimals",
    ),
    (r"min/maxProperties only supported", "minProperties and maxProperties can be followed only"),
    (r"Regex is empty: .*", "its pattern, format and lengths leave no text"),
    (r"Unable to determine if regex is empty: .*", "its pattern, format and lengths are too costly together"),
    (r"NoExtension(?:Bias)?\b", "no text follows it"),
    (r"LexerTooComplex\b", "its expressions are too costly"),
    (r"ParserTooComplex\b", "its rules are too costly"),
    (r"\bmin=(?:Some\((.*?)\)|None), max=(?:Some\((.*?)\)|None)", r"\1 to \2"),
)


def plain(reason: str) -> str:
    """Returns a reason of the compiler without names that exist only in its source, and shortened."""
    for pattern, words in _WORDS:
        reason = re.sub(pattern, words, reason)
    return reason.strip()[:_MAX_CHARS]


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
