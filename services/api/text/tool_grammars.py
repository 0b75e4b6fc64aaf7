"""From the tools of a request to the grammar that its output follows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.api.errors import ApiError
from services.api.text.dialect import Dialect
from services.api.tools.fields import FunctionDefinition
from tokenization.grammars.compiler import problem_of
from tokenization.grammars.problems import GrammarRefused, find_place
from tokenization.grammars.sources import of_lark, of_schema
from tokenization.tool_formats.grammar import GrammarWriter, TokenId, UnwritableTool, no_tokens
from tokenization.tool_formats.parts import OutputForm, Tool

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Calls:
    """What a request wants of the calls in its output.

    Attributes:
        forced: Whether the output is calls and nothing else.
        answer: JSON Schema of an output that is no call; None for any text.
    """

    tools: Sequence[FunctionDefinition]
    forced: bool
    parallel: bool
    answer: Any = None

    @property
    def constrained(self) -> bool:
        return self.forced or self.answer is not None or any(tool.strict for tool in self.tools)


def tool_grammar(calls: Calls, dialect: Dialect, form: OutputForm) -> str:
    """The grammar as a worker compiles it, after it has been tried here; empty where the output is free.

    Raises:
        ApiError: 400: a tool's schema cannot be compiled or is too large, or the model's format cannot express it.
    """
    if not calls.constrained:
        return ""
    try:
        problem = _problem(calls, dialect, form)
        if problem:
            raise _located(calls, problem)
        return of_lark(_written(calls, dialect, form, dialect.token_id))
    except UnwritableTool as refused:
        raise _refused(calls, refused.tool, refused.reason) from refused


def _problem(calls: Calls, dialect: Dialect, form: OutputForm) -> str:
    """Returns why the calls cannot be followed; empty if they can."""
    try:
        return problem_of(of_lark(_written(calls, dialect, form, no_tokens)))
    except GrammarRefused as refused:
        return str(refused)


def _written(calls: Calls, dialect: Dialect, form: OutputForm, token_id: TokenId) -> str:
    tools = [Tool(each.name, json.dumps(_schema(each, calls.forced))) for each in calls.tools]
    writer = GrammarWriter(dialect.format, tools, token_id)
    lead = {"reasons": form.reasons, "in_reasoning": form.in_reasoning}
    if calls.forced:
        return writer.forced(parallel=calls.parallel, **lead)
    if calls.answer is not None:
        return writer.calls_or(calls.answer, parallel=calls.parallel, **lead)
    return writer.free(parallel=calls.parallel, **lead)


def _schema(tool: FunctionDefinition, forced: bool) -> dict[str, Any]:
    """A call that the model chooses to make follows a schema that is strict."""
    if not forced and not tool.strict:
        return _ANY_ARGUMENTS
    if not tool.parameters:
        return NO_ARGUMENTS
    return {"type": "object", **tool.parameters}


def _located(calls: Calls, problem: str) -> ApiError:
    """The tool that is the reason, and the place in its schema."""

    def problem_with(schema: Any) -> str:
        try:
            return problem_of(of_schema(schema))
        except GrammarRefused as refused:
            return refused.reason

    for tool in calls.tools:
        schema = _schema(tool, calls.forced)
        if problem_with(schema):
            place, reason = find_place(schema, problem_with)
            where = f"at {place!r} in the schema: " if place else ""
            return _refused(calls, tool.name, f"{where}{reason}")
    return ApiError(f"tools: these cannot be followed together: {problem}", param="tools", code="invalid_grammar")


def _refused(calls: Calls, name: str, reason: str) -> ApiError:
    index = next(index for index, tool in enumerate(calls.tools) if tool.name == name)
    field = f"tools[{index}].function.parameters"
    return ApiError(f"{field}: calls of {name!r} cannot be followed: {reason}", param=field, code="invalid_grammar")
