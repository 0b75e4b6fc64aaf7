"""Reads the channels of harmony: reasoning, calls and the answer are messages with a header each.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`` is reasoning and an answer;
``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}`` is a call. The prompt has written
``<|start|>assistant``.
"""

from __future__ import annotations

import re

from farsight.tokenization.tool_formats.object_call import JsonEnd
from farsight.tokenization.tool_formats.parts import (
    CallArguments,
    CallEnd,
    CallStart,
    OutputForm,
    Part,
    ReasoningPart,
    TextPart,
)

_MARKER = re.compile(r"<\|(?:channel|message|constrain|start|end|call|return)\|>")
_MAX_MARKER = len("<|constrain|>")
_CALLED = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_MAX_HEADER = 1000


class HarmonyParser:
    """As ``parser.OutputParser``, for this family."""

    def __init__(self, form: OutputForm) -> None:
        self._form = form
        self._buffer = ""
        self._header = ""
        self._in_header = False
        self._kind = "final"
        self._value = JsonEnd()
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while (found := _MARKER.search(self._buffer)) is not None:
            self._body(self._buffer[: found.start()], parts)
            self._buffer = self._buffer[found.end() :]
            self._marker(found[0], parts)
        cut = self._buffer.rfind("<", max(0, len(self._buffer) - _MAX_MARKER))
        ready = self._buffer if cut < 0 else self._buffer[:cut]
        self._buffer = self._buffer[len(ready) :]
        self._body(ready, parts)
        return parts

    def end(self) -> list[Part]:
        parts: list[Part] = []
        rest, self._buffer = self._buffer, ""
        self._body(rest, parts)
        return parts

    def _marker(self, marker: str, parts: list[Part]) -> None:
        if marker == "<|message|>":
            self._in_header = False
            self._open(parts)
        elif marker == "<|constrain|>":
            self._header += " "
        else:
            if not self._in_header:
                self._header = ""
            self._in_header = marker in ("<|start|>", "<|channel|>")
            self._header += "\n" if marker == "<|channel|>" else ""
            self._kind = "final"

    def _open(self, parts: list[Part]) -> None:
        called = _CALLED.search(self._header)
        if called is not None and self._form.tools:
            self._kind = "call"
            self._value = JsonEnd()
            parts.append(CallStart(self.num_calls, called[1]))
            self.num_calls += 1
        else:
            channel = self._header.partition("\n")[2].split()[:1]
            self._kind = "analysis" if channel == ["analysis"] else "final"
        self._header = ""

    def _body(self, text: str, parts: list[Part]) -> None:
        if not text:
            return
        if self._in_header:
            self._header = (self._header + text)[-_MAX_HEADER:]
        elif self._kind == "call":
            parts.append(CallArguments(self.num_calls - 1, text))
            if (
                self._value.find(text) >= 0
            ):  # The marker behind a call is a token that ends the output: not in its text.
                parts.append(CallEnd(self.num_calls - 1))
        elif self._kind == "analysis":
            if self._form.shows_reasoning:
                parts.append(ReasoningPart(text))
        else:
            parts.append(TextPart(text))
