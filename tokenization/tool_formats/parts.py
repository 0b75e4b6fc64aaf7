"""What an output consists of, as a parser finds it, and what it was told of the tools."""

from __future__ import annotations

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
    """

    format: str
    tools: tuple[str, ...] = ()
    reasons: bool = False
    in_reasoning: bool = False
    shows_reasoning: bool = True
    forced: bool = False
    parallel: bool = True
