"""Writes a JSON Schema so that its compiler follows it exactly: bounds, ``oneOf``, ``uniqueItems``, depth."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from typing import Any

from farsight.tokenization.grammars.disjoint import EXACT, are_disjoint, finite_values, resolved
from farsight.tokenization.grammars.problems import GrammarRefused, escaped

MAX_DEPTH = 124
"""Levels of objects and lists within a schema. The compiler's JSON reader stops at 128, the grammar around included."""

MAX_UNIQUE_LISTS = 400
"""Lists that a schema with ``uniqueItems`` is written out as."""

_DIGITS = 15
_DECIMALS = 20
"""Significant digits and decimals of a number that the compiler's JSON reader reads exactly; of more, it may read a
neighbour."""

_LONGEST = 2**31 - 1
"""Characters of a string that the compiler counts; no output has so many."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = frozenset(("const", "enum", "default", "examples", "example", "required", "type", "dependentRequired"))
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ANNOTATIONS = frozenset(("title", "description", "$comment", "default", "examples", "deprecated"))


def as_text(schema: Any) -> str:
    """Returns a schema as JSON text, after a check that JSON can hold it.

    Raises:
        GrammarRefused: It is nested too deeply, or has a number that is none of JSON.
    """
    depth = nesting(schema)
    if depth > MAX_DEPTH:
        raise GrammarRefused(f"it is nested {depth} levels deep, at most {MAX_DEPTH} levels are taken (of JSON)")
    try:
        return json.dumps(schema, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise GrammarRefused("NaN and Infinity are no numbers of JSON") from error


def rewritten(schema: Any) -> Any:
    """Returns a schema of the same values, or of fewer where the compiler cannot express all of them.

    Args:
        schema: As parsed from JSON, nested no deeper than ``as_text`` takes. It stays as it is.

    Raises:
        GrammarRefused: A keyword cannot be followed; names the place.
    """
    if isinstance(schema, dict):
        # The compiler's own options are not the client's: some of them let it disregard what it cannot follow.
        schema = {key: value for key, value in schema.items() if key != "x-guidance"}
    return _Rewriter(schema).schema(schema, "")


def nesting(value: Any, most: float = math.inf) -> int:
    """Returns the levels of objects and lists of a JSON value, a scalar counted as one.

    Args:
        most: Counting stops one level above this.
    """
    level, found = [value], 0
    while level and found <= most:
        found += 1
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
    return found


class _Rewriter:
    """Rewrites one schema.

    Args:
        root: Where local references lead to.
    """

    def __init__(self, root: Any) -> None:
        self._root = root

    def schema(self, schema: Any, place: str) -> Any:
        """Returns a subschema rewritten, with all within it."""
        if not isinstance(schema, dict):
            return schema
        found = {key: self._keyword(key, value, f"{place}/{escaped(key)}") for key, value in schema.items()}
        for key in ("const", "enum"):
            if key in found:
                _check_data(found[key], f"{place}/{key}")
        found = _inclusive(found, place)
        if isinstance(found.get("maxLength"), int):
            found["maxLength"] = min(found["maxLength"], _LONGEST)
        if "uniqueItems" in found:
            found = self._unique(found, place)
        if isinstance(found.get("oneOf"), list):
            found = self._one_of(found)
        return found

    def _keyword(self, key: str, value: Any, place: str) -> Any:
        if key in _DATA:
            return value
        if key in _MAPS and isinstance(value, dict):
            return {name: self.schema(each, f"{place}/{escaped(name)}") for name, each in value.items()}
        if isinstance(value, list):
            return [self.schema(each, f"{place}/{index}") for index, each in enumerate(value)]
        return self.schema(value, place)

    def _one_of(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Returns ``anyOf`` where no value follows two of the options; what is left the compiler judges."""
        options = schema["oneOf"]
        rest = {key: value for key, value in schema.items() if key != "oneOf"}
        names = [_only_required(option) for option in options]
        if len(options) > 1 and all(names) and len(set(names)) == len(names):
            # "Exactly one of these properties": the others are not there.
            options = [
                {"type": "object", "required": [name], "properties": {other: False for other in names if other != name}}
                for name in names
            ]
        else:
            known = [_typed(resolved(option, self._root), rest.get("type")) for option in options]
            if not all(are_disjoint(one, other, self._root) for one, other in itertools.combinations(known, 2)):
                return schema
        if "anyOf" in rest:  # "allOf" takes a second one
            all_of = rest.get("allOf", [])
            return {**rest, "allOf": [*all_of, {"anyOf": options}]} if isinstance(all_of, list) else schema
        return {("anyOf" if key == "oneOf" else key): (options if key == "oneOf" else schema[key]) for key in schema}

    def _unique(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """Returns the lists of distinct items themselves, of which there must be few."""
        unique = schema["uniqueItems"]
        rest = {key: value for key, value in schema.items() if key != "uniqueItems"}
        if unique is not True:
            if unique is not False:
                raise GrammarRefused(f"uniqueItems is {json.dumps(unique)[:100]}, true or false is expected", place)
            return rest
        if rest.get("maxItems") in (0, 1):
            return rest
        values = finite_values(rest.get("items"), self._root)
        if rest.get("type") != "array" or values is None or not rest.keys() <= _UNIQUE_KEYS:
            reason = (
                "uniqueItems can be followed in a schema with type 'array', where maxItems is 1 or items has a list of"
                " values (enum, const, boolean, null, integers between two bounds) and no other keyword is beside it"
            )
            raise GrammarRefused(reason, place)
        least, most = rest.get("minItems", 0), rest.get("maxItems", len(values))
        if not isinstance(least, int) or not isinstance(most, int):
            return rest  # refused by the compiler, which names the wrong one
        lists = _distinct(values, least, min(most, len(values)), place)
        kept = {key: value for key, value in rest.items() if key not in ("items", "minItems", "maxItems")}
        return {**kept, "enum": lists}


_NAMING = frozenset(("$defs", "definitions", "$schema", "$id"))
_UNIQUE_KEYS = frozenset(("type", "items", "minItems", "maxItems")) | _ANNOTATIONS | _NAMING


def _distinct(values: list[Any], least: int, most: int, place: str) -> list[Any]:
    """Returns the lists of ``least`` to ``most`` distinct values: in every order or, if these are too many, in the
    order of the values."""
    lengths = range(max(0, least), most + 1)
    if not lengths:
        raise GrammarRefused(f"uniqueItems: {len(values)} values make no list of {least} items or more", place)
    if sum(math.perm(len(values), length) for length in lengths) <= MAX_UNIQUE_LISTS:
        return [list(each) for length in lengths for each in itertools.permutations(values, length)]
    found = sum(math.comb(len(values), length) for length in lengths)
    if found <= MAX_UNIQUE_LISTS:
        return [list(each) for length in lengths for each in itertools.combinations(values, length)]
    reason = f"uniqueItems: {len(values)} values make {found} lists of distinct items, at most {MAX_UNIQUE_LISTS}"
    raise GrammarRefused(f"{reason} are taken: set a lower maxItems", place)


def _only_required(option: Any) -> str:
    """Returns the name where an option says no more than that one property is there; else nothing."""
    if not isinstance(option, dict) or option.keys() - _ANNOTATIONS - {"type"} != {"required"}:
        return ""
    names = option["required"]
    if option.get("type", "object") != "object" or not isinstance(names, list) or len(names) != 1:
        return ""
    return names[0] if isinstance(names[0], str) else ""


def _typed(option: Any, named: Any) -> Any:
    """Returns an option with the type that is named beside all of them, if it names none."""
    return {"type": named, **option} if isinstance(option, dict) and named is not None else option


def _inclusive(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the schema with ``minimum`` and ``maximum`` alone.

    The compiler allows some exclusive bounds themselves. What is further inwards by a unit of the 15th digit cannot
    become the bound either when a client reads it as a number of 64 bits.
    """
    if not any(key in schema for key in _BOUNDS):
        return schema
    for key in _BOUNDS:
        _check_bound(key, schema, place)
    lower: list[float] = []
    upper: list[float] = []
    for name, bounds, side in (("minimum", lower, -1), ("maximum", upper, 1)):
        exclusive = schema.get(f"exclusive{name.title()}", False)  # a number; in draft 4, true for the bound beside it
        if name in schema:
            bounds.append(_bound(schema[name], side, f"{place}/{name}", exclusive=exclusive is True))
        if not isinstance(exclusive, bool):
            bounds.append(_bound(exclusive, side, f"{place}/exclusive{name.title()}", exclusive=True))
    found = {}
    for key, value in schema.items():
        name = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}.get(key, key)
        if name == "minimum":
            found.update({name: max(lower)} if lower else {})
        elif name == "maximum":
            found.update({name: min(upper)} if upper else {})
        else:
            found[key] = value
    return found


def _check_bound(key: str, schema: Mapping[str, Any], place: str) -> None:
    value = schema.get(key, 0)
    if isinstance(value, bool) and key.startswith("exclusive"):
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GrammarRefused(f"{key} is {json.dumps(value)[:100]}, a number is expected", place)


def _bound(value: float, side: int, place: str, *, exclusive: bool) -> float:
    """Returns an inclusive bound that the compiler reads and computes exactly: this one, or the next one inwards.

    Args:
        side: -1 for a lower bound, 1 for an upper one.
    """
    if side * value > EXACT:
        return side * EXACT
    if abs(value) > EXACT:
        raise GrammarRefused(f"the bound {_shown(value)} is further from 0 than 2^53", place)
    given = Decimal(repr(value))
    place_of_last = max(given.adjusted() - _DIGITS + 1, -_DECIMALS) if given else -_DECIMALS
    step = Decimal(1).scaleb(min(place_of_last, 0) if isinstance(value, int) else place_of_last)
    with localcontext(prec=60):
        found = given.quantize(step, ROUND_CEILING if side < 0 else ROUND_FLOOR)
        if exclusive and found == given:
            found -= side * step
    return int(found) if found == int(found) else float(found)


def _check_data(value: Any, place: str) -> None:
    """Refuses data with a number that the compiler would write as its neighbour."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, int) and abs(each) > EXACT:
            raise GrammarRefused(f"the integer {_shown(each)} is further from 0 than 2^53", place)
        if isinstance(each, float) and _bound(each, 1, place, exclusive=False) != each and abs(each) < EXACT:
            reason = f"the number {each} has more than {_DIGITS} significant digits or {_DECIMALS} decimals"
            raise GrammarRefused(reason, place)
        left += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()


def _shown(number: float) -> str:
    return str(number)[:40]
