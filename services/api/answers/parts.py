"""Outputs as clients get them: text, reasoning and calls of tools, whole or as the deltas of a stream."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from tokenization.tool_formats.parser import parser_of
from tokenization.tool_formats.parts import (
    CallArguments,
    CallStart,
    OutputForm,
    ReasoningPart,
    SentCalls,
    SentPart,
    TextPart,
)

_SHORT_IDS = ("mistral", "mistral-args")
"""Their templates take ids of nine letters and digits alone."""


def call_id(response_id: str, choice: int, index: int, form: OutputForm) -> str:
    """The id of a call; the same at every replica that writes the answer."""
    digest = hashlib.blake2b(f"{response_id}/{choice}/{index}".encode(), digest_size=12).hexdigest()
    return digest[:9] if form.format in _SHORT_IDS else f"call_{digest}"


@dataclass(slots=True)
class ToolCallMade:
    """A call as far as it is known."""

    call_id: str
    name: str
    arguments: str = ""

    def fields(self) -> dict[str, Any]:
        return {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(slots=True)
class TakenApart:
    """One choice, taken apart.

    Attributes:
        content: None where there are calls and no text.
    """

    content: str | None = ""
    reasoning: str = ""
    calls: list[ToolCallMade] = field(default_factory=list)


class ChoiceParts:
    """Takes one choice of an answer apart.

    Args:
        stream: Whether the first call is known while it is being written.
    """

    def __init__(self, form: OutputForm, response_id: str, choice: int, *, stream: bool) -> None:
        self._form = form
        self._id = response_id, choice
        self._parser = parser_of(form)
        self._calls = SentCalls(parallel=form.parallel, as_written=stream)

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    def read(self, text: str, *, ended: bool) -> list[SentPart]:
        """The parts that further text makes known; neighbours of one kind are one."""
        parts = self._parser.feed(text)
        if ended:
            parts = [*parts, *self._parser.end()]
        return _merged(self._calls.read(parts))

    def deltas(self, text: str, *, ended: bool) -> list[dict[str, Any]]:
        """``read`` as the deltas of a chat's stream."""
        return [self._delta(part) for part in self.read(text, ended=ended)]

    def _delta(self, part: SentPart) -> dict[str, Any]:
        match part:
            case TextPart():
                return {"content": part.text}
            case ReasoningPart():
                return {"reasoning_content": part.text}
            case CallStart():
                return {"tool_calls": [{"index": part.index, **ToolCallMade(self.id_of(part), part.name).fields()}]}
            case CallArguments():
                return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}

    def id_of(self, start: CallStart) -> str:
        return call_id(*self._id, start.index, self._form)

    def finish_reason(self, reason: str | None) -> str | None:
        """As the client is told: an output that has ended with calls wants their results."""
        return "tool_calls" if reason == "stop" and self.num_calls else reason


def answer_of(form: OutputForm | None, text: str, response_id: str, choice: int) -> TakenApart:
    """A whole output, taken apart."""
    if form is None:
        return TakenApart(text)
    found = TakenApart()
    parts = ChoiceParts(form, response_id, choice, stream=False)
    for part in parts.read(text, ended=True):
        match part:
            case TextPart():
                found.content = (found.content or "") + part.text
            case ReasoningPart():
                found.reasoning += part.text
            case CallStart():
                found.calls.append(ToolCallMade(parts.id_of(part), part.name))
            case CallArguments():
                found.calls[part.index].arguments += part.text
    if found.calls and not found.content:
        found.content = None
    return found


def _merged(parts: list[SentPart]) -> list[SentPart]:
    merged: list[SentPart] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, TextPart) and isinstance(last, TextPart):
            merged[-1] = TextPart(last.text + part.text)
        elif isinstance(part, ReasoningPart) and isinstance(last, ReasoningPart):
            merged[-1] = ReasoningPart(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and last.index == part.index:
            merged[-1] = CallArguments(part.index, last.text + part.text)
        else:
            merged.append(part)
    return merged
