"""What an output consists of, as a parser finds it; what it was told of the tools; which calls a client is sent."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Text that the model wrote for itself, before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins; its arguments follow.

    Attributes:
        index: Number of the call in its output, from 0.
    """

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further part of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of a call are whole. An output that is cut within them has none for that call."""

    index: int


SentPart = TextPart | ReasoningPart | CallStart | CallArguments
"""What a client gets to know."""

Part = SentPart | CallEnd


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: The JSON Schema of its arguments, as JSON text; it describes an object.
    """

    name: str
    parameters: str


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What an output may hold beside text.

    Attributes:
        format: Name of the format of tool calls (``formats.FORMATS``).
        tools: Names that may be called; empty if calls are no concern, so that text which looks like one stays text.
        reasons: Whether the model may reason before it answers.
        in_reasoning: Whether the prompt has begun the reasoning already.
        shows_reasoning: Whether the client gets it.
        forced: Whether it is calls and nothing else: then the beginning of a call that was cut is no text.
        parallel: Whether it may hold several calls; if not, the first is sent alone.
        texts: Tools and those of their arguments that are texts.
        custom: Names of tools that take one text, of which the model knows functions with the argument ``input``.
    """

    format: str
    tools: tuple[str, ...] = ()
    reasons: bool = False
    in_reasoning: bool = False
    shows_reasoning: bool = True
    forced: bool = False
    parallel: bool = True
    custom: tuple[str, ...] = ()
    texts: frozenset[tuple[str, str]] = frozenset()


class SentCalls:
    """Passes on the parts of one output, leaves out calls that are not sent, and numbers the remaining calls.

    Args:
        parallel: Whether there may be several.
        as_written: Whether the first call is passed on while its arguments are being written, and so also if it is cut.
            Any further one waits until it is whole, as only then it is known whether it repeats an earlier one.

    Attributes:
        num_calls: Calls that were passed on.
    """

    def __init__(self, *, parallel: bool, as_written: bool) -> None:
        self._parallel = parallel
        self._as_written = as_written
        self._seen: set[tuple[str, str]] = set()
        self._open: CallStart | None = None
        self._arguments: list[str] = []
        self._is_sent = False
        self.num_calls = 0

    def read(self, parts: Iterable[Part]) -> list[SentPart]:
        """Returns what is sent of further parts."""
        return [sent for part in parts for sent in self._read(part)]

    def _read(self, part: Part) -> list[SentPart]:
        match part:
            case CallStart():
                is_wanted = self._parallel or not self.num_calls
                self._open, self._arguments = (part if is_wanted else None), []
                self._is_sent = is_wanted and self._as_written and not self.num_calls
                return [self._start(part)] if self._is_sent else []
            case CallArguments():
                if self._open is None:
                    return []
                self._arguments.append(part.text)
                return [CallArguments(self.num_calls - 1, part.text)] if self._is_sent else []
            case CallEnd():
                return self._end()
            case _:
                return [part]

    def _start(self, start: CallStart) -> CallStart:
        self.num_calls += 1
        return CallStart(self.num_calls - 1, start.name)

    def _end(self) -> list[SentPart]:
        start, self._open = self._open, None
        if start is None:
            return []
        text = "".join(self._arguments)
        call = start.name, _canonical(text)
        is_new = call not in self._seen
        self._seen.add(call)
        if self._is_sent or not is_new:
            return []
        return [self._start(start), CallArguments(self.num_calls - 1, text)]


def _canonical(arguments: str) -> str:
    """Returns the same text for arguments that differ in their spaces or the order of their names."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
