"""The grammar that the output of a request follows: its own, or that of the tools that it may call."""

from __future__ import annotations

from core.errors import InvalidValueError
from services.api.schemas import ChatCompletionRequest, SamplingFields
from services.api.text.dialect import Dialect
from services.api.text.grammars import grammar_of, schema_of
from services.api.text.tool_grammars import Calls, tool_grammar
from tokenization.tool_formats.parts import OutputForm


def own_grammar(body: SamplingFields, *, emulated: bool) -> str:
    """The grammar of an output that calls no tools; empty for none.

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
    """The grammar of an output that may call tools or reason; the rest as for ``own_grammar``."""
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
    calls = Calls(body.usable_tools, body.must_call, body.may_call_in_parallel, answer)
    return tool_grammar(calls, dialect, form)
