"""The fields of the OpenAI API that a request may carry, and the errors for all others.

An unsupported field is never ignored. It is refused unless it holds the value that means "not used", which some
clients send by default.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from pydantic_core import PydanticCustomError


@dataclass(frozen=True, slots=True)
class NeutralOnly:
    """A field that Farsight does not support and accepts only with a neutral value.

    Attributes:
        neutral: Values that change nothing; ``null`` always counts as one.
        hint: What to do instead, as a clause.
    """

    neutral: tuple[Any, ...]
    hint: str

    def accepts(self, value: Any) -> bool:
        return value is None or any(_same(value, each) for each in self.neutral)

    @property
    def expected(self) -> str:
        shown = " or ".join(_json(value) for value in (*self.neutral, None))
        return f"{shown}: {self.hint}"


_NO_TOOLS = NeutralOnly(([],), "tools are not supported, describe them in a message and parse the answer")
_NO_TOOL_CHOICE = NeutralOnly(("none", "auto"), "tools are not supported")

COMPLETION_NEUTRAL: dict[str, NeutralOnly] = {
    "suffix": NeutralOnly(("",), "infilling before a suffix is not supported, put all text into the prompt"),
}

CHAT_NEUTRAL: dict[str, NeutralOnly] = {
    "audio": NeutralOnly((), "only text can be generated"),
    "function_call": _NO_TOOL_CHOICE,
    "functions": _NO_TOOLS,
    "modalities": NeutralOnly((["text"],), "only text can be generated"),
    "parallel_tool_calls": NeutralOnly((True, False), "tools are not supported"),
    "prediction": NeutralOnly((), "predicted outputs are not supported"),
    "reasoning_effort": NeutralOnly(("none",), "reasoning effort is not supported"),
    "response_format": NeutralOnly(({"type": "text"},), "structured output is not supported, ask for it in a message"),
    "store": NeutralOnly((False,), "answers are not stored"),
    "tool_choice": _NO_TOOL_CHOICE,
    "tools": _NO_TOOLS,
    "web_search_options": NeutralOnly((), "web search is not supported"),
}

MESSAGE_NEUTRAL: dict[str, NeutralOnly] = {
    "annotations": NeutralOnly(([],), "only the text of earlier answers is used"),
    "audio": NeutralOnly((), "only text is understood"),
    "function_call": NeutralOnly((), "tools are not supported"),
    "refusal": NeutralOnly((), "put the text into content"),
    "tool_calls": NeutralOnly(([],), "tools are not supported"),
}


def refused(suffix: str, got: Any, expected: str) -> PydanticCustomError:
    """An error for use inside a validator.

    Args:
        suffix: The place inside the validated value, such as ``[3]`` or ``.tools``.
    """
    return PydanticCustomError("refused", "expected {expected}", {"suffix": suffix, "got": got, "expected": expected})


def strip_neutral(data: Any, known: Iterable[str], neutral: Mapping[str, NeutralOnly]) -> Any:
    """Drops unsupported fields that hold a neutral value.

    Raises:
        PydanticCustomError: An unsupported field holds another value, or a field is unknown.
    """
    if not isinstance(data, dict):
        return data
    fields = set(known)
    kept = {}
    for name, value in data.items():
        if name in fields:
            kept[name] = value
        elif name not in neutral:
            raise _unknown_field(name, fields)
        elif not neutral[name].accepts(value):
            raise refused(f".{name}", value, neutral[name].expected)
    return kept


def _unknown_field(name: str, fields: set[str]) -> PydanticCustomError:
    close = difflib.get_close_matches(name, sorted(fields))
    # Prefer the match with the same beginning: max_completion_tokens means max_tokens rather than min_tokens.
    nearest = max(close, key=lambda each: _common_start(each, name), default=None)
    hint = f"did you mean {nearest!r}?" if nearest else f"the fields are {', '.join(sorted(fields))}"
    return PydanticCustomError("unknown_field", "unknown field; {hint}", {"suffix": f".{name}", "hint": hint})


def _common_start(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _same(value: Any, neutral: Any) -> bool:
    """Equality of JSON values: unlike in Python, ``true`` is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _json(value: Any) -> str:
    names = {None: "null", True: "true", False: "false"}
    return names[value] if value is None or isinstance(value, bool) else repr(value).replace("'", '"')
