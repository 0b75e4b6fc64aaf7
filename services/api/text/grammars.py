"""From the constraint of a request to the grammar that its output follows."""

from __future__ import annotations

import json
from typing import Any

from services.api.errors import ApiError
from services.api.structured import Constraint
from tokenization.grammars import sources
from tokenization.grammars.compiler import problem_of
from tokenization.grammars.problems import GrammarRefused, find_place


def grammar_of(constraint: Constraint) -> str:
    """The grammar as a worker compiles it, after it has been tried here.

    It takes up to some 70 ms for a grammar that is not known yet (``tokenization.grammars.compiler.LIMITS``), most of
    them without the interpreter's lock.

    Raises:
        ApiError: 400: it cannot be compiled, is too large or leaves no text; says where in the schema.
    """
    try:
        grammar = _source(constraint)
        problem = problem_of(grammar)
        if problem:
            raise _located(constraint, problem)
    except GrammarRefused as refused:
        field = constraint.field + refused.place.replace("/", ".")
        where = f" at {refused.place!r} in the schema" if refused.place else ""
        message = f"{constraint.field}: this cannot be followed{where}: {refused.reason}"
        raise ApiError(message, param=field, code="invalid_grammar") from refused
    return grammar


def schema_of(constraint: Constraint) -> Any:
    """The JSON Schema of an output; None where a constraint is none."""
    if constraint.kind == "object":
        return sources.ANY_OBJECT
    if constraint.kind != "schema":
        return None
    return json.loads(constraint.value) if isinstance(constraint.value, str) else constraint.value


def _source(constraint: Constraint) -> str:
    value = constraint.value
    match constraint.kind:
        case "schema":
            return _of_schema(value, constraint.compact)
        case "object":
            return _of_schema(sources.ANY_OBJECT, constraint.compact)
        case "regex":
            return sources.of_regex(value)
        case "choice":
            return sources.of_choices(value)
        case "grammar":
            return sources.of_grammar(value)
        case "tags":
            tags = [sources.Tag(each.begin, each.schema_, each.end) for each in value.structures]
            return sources.of_tags(tags, value.triggers)


def _of_schema(schema: Any, compact: bool) -> str:
    return sources.of_schema(schema, None if compact else sources.WHITESPACE)


def _located(constraint: Constraint, problem: str) -> GrammarRefused:
    if constraint.kind != "schema":
        return GrammarRefused(problem)
    schema = json.loads(constraint.value) if isinstance(constraint.value, str) else constraint.value

    def problem_with(each: Any) -> str:
        try:
            return problem_of(_of_schema(each, constraint.compact))
        except GrammarRefused as refused:
            return refused.reason

    place, reason = find_place(schema, problem_with)
    return GrammarRefused(reason, place)
