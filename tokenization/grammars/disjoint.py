"""Proves that no JSON value follows two schemas at once, as far as that can be seen without compiling them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

EXACT = 2**53
"""Up to here, every integer is a number of 64 bits in floating point."""

MAX_VALUES = 256
"""Integers between two bounds that count as a list of values."""

_MAX_STEPS = 40
"""References followed, and levels compared, before a proof is given up: schemas may refer to themselves."""

_TYPES = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
"""Every value has one of these; a ``fraction`` is a number that is no integer."""


def resolved(schema: Any, root: Any) -> Any:
    """Returns a schema with its local references (``#/...``) followed, and merged with the keywords beside them.

    A reference that leads nowhere stays, and so does one to a schema that gives one of these keywords again.
    """
    for _ in range(_MAX_STEPS):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        target = _target(schema["$ref"], root)
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        if not isinstance(target, dict) or target.keys() & rest.keys():
            return target if isinstance(target, bool) and not rest else schema
        schema = {**target, **rest}
    return {"$ref": "#"}


def _target(reference: str, root: Any) -> Any:
    found = root
    if reference == "#":
        return found
    if not reference.startswith("#/"):
        return None
    for step in reference[2:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
    return found


def finite_values(schema: Any, root: Any) -> list[Any] | None:
    """Returns the distinct values that a schema describes if they are written in it or few; else None."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return None
    keys = schema.keys() - {"title", "description", "$comment", "default", "examples"}
    if keys <= {"const", "type"} and "const" in keys:
        values = [schema["const"]]
    elif keys <= {"enum", "type"} and isinstance(schema.get("enum"), list):
        values = schema["enum"]
    elif keys == {"type"} and schema["type"] in ("boolean", "null"):
        values = [False, True] if schema["type"] == "boolean" else [None]
    elif keys == {"type", "minimum", "maximum"} and schema["type"] == "integer":
        low, high = math.ceil(_number(schema, "minimum", -EXACT)), math.floor(_number(schema, "maximum", EXACT))
        if high - low >= MAX_VALUES:
            return None
        values = list(range(low, high + 1))
    else:
        return None
    allowed = _types(schema)
    distinct = {_key(value): value for value in values if _type_of(value) in allowed}
    return list(distinct.values())


def are_disjoint(one: Any, other: Any, root: Any, steps: int = _MAX_STEPS) -> bool:
    """Returns whether it is certain that no value follows both schemas."""
    one, other = resolved(one, root), resolved(other, root)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or steps <= 0:
        return False
    for first, second in ((one, other), (other, one)):
        for key in ("anyOf", "oneOf"):
            options = first.get(key)
            if isinstance(options, list) and all(are_disjoint(each, second, root, steps // 2) for each in options):
                return True
        for each in first.get("allOf", ()) if isinstance(first.get("allOf"), list) else ():
            if are_disjoint(each, second, root, steps // 2):
                return True
    shared = _types(one) & _types(other)
    return all(_disjoint_within(name, one, other, root, steps) for name in shared)


def _disjoint_within(name: str, one: Mapping[str, Any], other: Mapping[str, Any], root: Any, steps: int) -> bool:
    """Returns whether no value of one type follows both."""
    listed, others = _listed(one, name), _listed(other, name)
    if listed is not None and others is not None and not listed & others:
        return True
    if name in ("integer", "fraction"):
        return _apart(one, other, "minimum", "maximum")
    if name == "string":
        return _apart(one, other, "minLength", "maxLength")
    if name == "array":
        return _apart(one, other, "minItems", "maxItems") or _items_apart(one, other, root, steps)
    return name == "object" and _properties_apart(one, other, root, steps)


def _items_apart(one: Mapping[str, Any], other: Mapping[str, Any], root: Any, steps: int) -> bool:
    """Returns whether a first item is there on one side at least, and follows only one of the two."""
    if max(_number(one, "minItems", 0), _number(other, "minItems", 0)) < 1:
        return False
    if any(isinstance(each.get(key), list) for each in (one, other) for key in ("prefixItems", "items")):
        return False
    return are_disjoint(one.get("items", True), other.get("items", True), root, steps - 1)


def _properties_apart(one: Mapping[str, Any], other: Mapping[str, Any], root: Any, steps: int) -> bool:
    """Returns whether a property that is there in any case follows only one of the two."""
    for first, second in ((one, other), (other, one)):
        required = first.get("required")
        for name in required if isinstance(required, list) else ():
            if isinstance(name, str) and are_disjoint(_property(first, name), _property(second, name), root, steps - 1):
                return True
    return False


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _apart(one: Mapping[str, Any], other: Mapping[str, Any], least: str, most: str) -> bool:
    return any(_number(a, most, math.inf) < _number(b, least, -math.inf) for a, b in ((one, other), (other, one)))


def _number(schema: Mapping[str, Any], key: str, default: float) -> float:
    value = schema.get(key, default)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _listed(schema: Mapping[str, Any], name: str) -> set[str] | None:
    """Returns the values of a type that a schema writes out, as texts to compare; None where it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return {_key(value) for value in values if _type_of(value) == name}


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    named = schema.get("type")
    names = named if isinstance(named, list) else [named] if isinstance(named, str) else sorted(_TYPES)
    found = {each for name in map(str, names) for each in (("integer", "fraction") if name == "number" else (name,))}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found &= {_type_of(value) for value in values}
    return frozenset(found)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == math.floor(value) else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _key(value: Any) -> str:
    """Returns the same text for equal JSON values: 1 and 1.0 are."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        return json.dumps({name: _key(each) for name, each in sorted(value.items())})
    return json.dumps([_key(each) for each in value]) if isinstance(value, list) else json.dumps(value)
