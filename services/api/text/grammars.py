"""The grammar that the output of a request follows: from its own constraint, or from the tools that it may call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farsight.core.errors import InvalidValueError
from farsight.services.api.errors import ApiError
from farsight.services.api.field_groups import FunctionDefinition
from farsight.services.api.structured import Constraint
from farsight.services.api.text.dialect import Dialect
from farsight.tokenization.grammars import sources
from farsight.tokenization.grammars.compiler import problem_of
from farsight.tokenization.grammars.problems import GrammarRefused, find_place
from farsight.tokenization.tool_formats.grammar import GrammarWriter, TokenId, UnwritableTool, no_tokens
from farsight.tokenization.tool_formats.parts import OutputForm, Tool

if TYPE_CHECKING:
    from farsight.services.api.schemas import ChatCompletionRequest, SamplingFields


def grammar_of(constraint: Constraint) -> str:
    """Returns the grammar as a worker compiles it, after it has been tried here.

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
    """Returns the JSON Schema of an output; None where a constraint is none."""
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

    def problem_with(each: Any) -> str:
        try:
            return problem_of(_of_schema(each, constraint.compact))
        except GrammarRefused as refused:
            return refused.reason

    place, reason = find_place(schema_of(constraint), problem_with)
    return GrammarRefused(reason, place)


NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Calls:
    """What a request wants of the calls in its output.

    Attributes:
        forced: Whether the output is calls and nothing else.
        answer: JSON Schema of an output that is no call; None for any text.
        limited: Whether the model knows tools that are not among these.
    """

    tools: Sequence[FunctionDefinition]
    forced: bool
    parallel: bool
    answer: Any = None
    limited: bool = False

    @property
    def constrained(self) -> bool:
        return self.forced or self.limited or self.answer is not None or any(tool.strict for tool in self.tools)


def tool_grammar(calls: Calls, dialect: Dialect, form: OutputForm) -> str:
    """Returns the grammar as a worker compiles it, after it has been tried here; empty where the output is free.

    Raises:
        ApiError: 400: a tool's schema cannot be compiled or is too large, or the model's format cannot express it.
    """
    if not calls.constrained:
        return ""
    try:
        problem = _problem(calls, dialect, form)
        if problem:
            raise _tool_at_fault(calls, problem)
        return sources.of_lark(_written(calls, dialect, form, dialect.token_id))
    except UnwritableTool as refused:
        raise _refused_tool(calls, refused.tool, refused.reason) from refused


def _problem(calls: Calls, dialect: Dialect, form: OutputForm) -> str:
    """Returns why the calls cannot be followed; empty if they can."""
    try:
        return problem_of(sources.of_lark(_written(calls, dialect, form, no_tokens)))
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
    """Returns the schema of the arguments: one that is not strict binds only a call that is forced."""
    if not forced and not tool.strict:
        return _ANY_ARGUMENTS
    if not tool.parameters:
        return NO_ARGUMENTS
    return {"type": "object", **tool.parameters}


def _tool_at_fault(calls: Calls, problem: str) -> ApiError:
    """Returns the error that names the tool that is the reason, and the place in its schema."""

    def problem_with(schema: Any) -> str:
        try:
            return problem_of(sources.of_schema(schema))
        except GrammarRefused as refused:
            return refused.reason

    for tool in calls.tools:
        schema = _schema(tool, calls.forced)
        if problem_with(schema):
            place, reason = find_place(schema, problem_with)
            where = f"at {place!r} in the schema: " if place else ""
            return _refused_tool(calls, tool.name, f"{where}{reason}")
    return ApiError(f"tools: these cannot be followed together: {problem}", param="tools", code="invalid_grammar")


def _refused_tool(calls: Calls, name: str, reason: str) -> ApiError:
    index = next(index for index, tool in enumerate(calls.tools) if tool.name == name)
    field = f"tools[{index}].function.parameters"
    return ApiError(f"{field}: calls of {name!r} cannot be followed: {reason}", param=field, code="invalid_grammar")


def own_grammar(body: SamplingFields, *, emulated: bool) -> str:
    """Returns the grammar of an output that calls no tools; empty for none.

    Args:
        emulated: Whether answers are made up.

    Raises:
        InvalidValueError, ApiError: It cannot be followed.
    """
    constraint = body.constraint
    if constraint is None:
        return ""
    if emulated:
        expected = "null: an emulated device makes its tokens up, so they follow nothing"
        raise InvalidValueError(constraint.field, constraint.kind, expected)
    return grammar_of(constraint)


def chat_grammar(body: ChatCompletionRequest, dialect: Dialect, form: OutputForm, *, emulated: bool) -> str:
    """Returns the grammar of an output that may call tools or reason; the rest as for ``own_grammar``."""
    constraint = body.constraint
    if body.must_call and emulated:
        expected = "'auto' or 'none': an emulated device makes its tokens up, so they follow nothing"
        raise InvalidValueError("tool_choice", "a forced call", expected)
    answer = None
    if constraint is not None and not body.must_call:
        own = own_grammar(body, emulated=emulated)  # refuses what cannot be followed, and names its place
        answer = schema_of(constraint)
        if answer is None and body.usable_tools:
            expected = "null beside tools: an output can follow a JSON Schema or call tools, and nothing else"
            raise InvalidValueError(constraint.field, constraint.kind, expected)
        if answer is None or not (body.usable_tools or form.reasons):
            return own
    if emulated:
        return ""
    calls = Calls(body.usable_tools, body.must_call, body.may_call_in_parallel, answer, body.limits_tools)
    return tool_grammar(calls, dialect, form)
