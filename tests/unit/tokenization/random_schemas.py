"""Makes schemas and outputs at random: of schemas, valid ones and broken ones; of outputs, what a grammar allows."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from farsight.tokenization.grammars.compiler import LIMITS

_VOCABULARY = LLTokenizer("byte")
_NAMES = ("a", "b", "x-y", "", "é", "\ud800", "\x00", '"', "/", "~", "%", "$ref", "type")
_NUMBERS = (0, 1, -1, 2.5, 1e-30, 1e300, 2**53 + 1, 2**63, -(2**70), 0.07, float("inf"))
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object", ["string", "null"], "nothing", 5)
_SUBSCHEMAS = ("items", "additionalProperties", "not", "if", "contains", "propertyNames", "unevaluatedProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_OTHERS: dict[str, tuple[Any, ...]] = {
    "type": _TYPES,
    "pattern": ("^a+$", "[", "(a|b){1,1000}", "(?=a)", r"\d{3}", r"\uD83D", "a{99999}"),
    "format": ("date", "uuid", "nothing", "uri"),
    "$ref": ("#", "#/$defs/a", "#/properties/b", "http://e/x", "#a", "#/%zz", "", ":"),
    "$id": ("http://e/x", "", "::"),
    "$schema": ("http://json-schema.org/draft-07/schema#", "nope"),
    "uniqueItems": (True, False),
    "x-guidance": ({"lenient": True}, {"nothing": 1}, 5),
}
_KEYS = (*_SUBSCHEMAS, *_LISTS, *_MAPS, *_BOUNDS, *_COUNTS, *_OTHERS, "enum", "const", "required", "unknown")


def random_schema(source: random.Random, levels: int = 4) -> Any:
    """Returns a schema, in which one keyword of eight has a value of any kind."""
    if levels <= 0 or source.random() < 0.05:
        return source.choice([True, False, {}, {"type": "string"}, _value(source, 1)])
    keys = source.sample(_KEYS, source.randrange(1, 6))
    return {key: _value(source, 2) if source.random() < 0.12 else _keyword(source, key, levels - 1) for key in keys}


def _keyword(source: random.Random, key: str, levels: int) -> Any:
    if key in _SUBSCHEMAS:
        return random_schema(source, levels)
    if key in _LISTS:
        return [random_schema(source, levels) for _ in range(source.randrange(4))]
    if key in _MAPS:
        return {source.choice(_NAMES): random_schema(source, levels) for _ in range(source.randrange(4))}
    if key in _BOUNDS:
        return source.choice(_NUMBERS)
    if key in _COUNTS:
        return source.choice((0, 1, 2, 3, 10**6, 2**40, -1, 1.5))
    return source.choice(_OTHERS[key]) if key in _OTHERS else _value(source, 2)


def _value(source: random.Random, levels: int) -> Any:
    if levels <= 0 or source.random() < 0.5:
        return source.choice((None, True, False, *_NUMBERS, *_NAMES))
    if source.random() < 0.5:
        return [_value(source, levels - 1) for _ in range(source.randrange(4))]
    return {source.choice(_NAMES): _value(source, levels - 1) for _ in range(source.randrange(4))}


def random_bounds(source: random.Random) -> dict[str, Any]:
    """Returns a schema of numbers between bounds, of which some are exclusive, on integers or at one end alone."""
    low, high = sorted(
        source.choice((0, 0.5, 1, 2, 2.5, 99, -1, -2.5, 1e-3, round(source.uniform(-9, 9), 2))) for _ in "ab"
    )
    schema: dict[str, Any] = {"type": source.choice(("number", "number", "integer"))}
    if source.random() < 0.8:
        schema[source.choice(("minimum", "exclusiveMinimum"))] = low
    if source.random() < 0.8:
        schema[source.choice(("maximum", "exclusiveMaximum"))] = high
    return schema


def random_output(grammar: str, source: random.Random, most: int = 60) -> str | None:
    """Returns an output that a grammar allows, one byte a token; None if it does not end within ``most``."""
    matcher, found = _compiled(grammar).deep_copy(), bytearray()
    for _ in range(most):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        ends = _VOCABULARY.eos_token in allowed
        if ends and (len(allowed) == 1 or source.random() < 0.2):
            return found.decode()
        token_id = source.choice([each for each in allowed if each != _VOCABULARY.eos_token])
        found.append(token_id)
        matcher.consume_token(token_id)
    return None


@functools.lru_cache(maxsize=4)
def _compiled(grammar: str) -> LLMatcher:
    return LLMatcher(_VOCABULARY, grammar, limits=LIMITS, log_level=0)
