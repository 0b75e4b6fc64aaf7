"""Takes an output apart as it comes: reasoning, text, and calls of tools with their arguments.

The parts do not depend on how the text was cut. Text that looks like a call and is none stays text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from farsight.tokenization.tool_formats.formats import FORMATS
from farsight.tokenization.tool_formats.harmony import HarmonyParser
from farsight.tokenization.tool_formats.object_call import JsonEnd, ObjectCall
from farsight.tokenization.tool_formats.parts import (
    CallArguments,
    CallEnd,
    CallStart,
    OutputForm,
    Part,
    ReasoningPart,
    TextPart,
)
from farsight.tokenization.tool_formats.pythonic import CALLS, MAYBE_CALLS, PythonEnd, read_call
from farsight.tokenization.tool_formats.regions import read_region

_MAX_HEADER = 1000
"""Most characters between an opener and the arguments of its call, and before the first call in Python."""

_BETWEEN = " \t\r\n,;]`"
"""What may stand between two calls."""


class Parser(Protocol):
    """Takes one output apart."""

    num_calls: int

    def feed(self, text: str) -> list[Part]:
        """The parts that further text completes; a part may be continued by the next."""
        ...

    def end(self) -> list[Part]:
        """The parts of what was held back, when the output has ended."""
        ...


def parser_of(form: OutputForm) -> Parser:
    return HarmonyParser(form) if FORMATS[form.format].style == "harmony" else OutputParser(form)


class OutputParser:
    """All families but harmony, by their ``ToolFormat``."""

    def __init__(self, form: OutputForm) -> None:
        self._form = form
        self._format = FORMATS[form.format]
        self._buffer = ""
        self._space = ""  # white space of the answer, which is shown if text follows it
        self._step = self._reasoning if form.in_reasoning else self._text
        self._has_text = self._has_reasoned = False
        self._behind_call = False
        self._behind_reasoning = form.in_reasoning
        self._opener = ""
        self._call: ObjectCall | None = None
        self._value = JsonEnd()
        self._python = PythonEnd()
        self._python_text = ""
        self._parts: list[Part] = []
        self.num_calls = 0
        is_bare = bool(form.tools) and self._format.style == "object" and not self._format.openers
        self._think_begin, self._think_end = self._format.think
        self._think_prefixes = _prefixes([self._think_end])
        self._searched = 0  # characters of the buffer in which a closer does not begin
        literals: tuple[str, ...] = (self._think_begin,) if form.reasons else ()
        if form.tools:  # what reasoning begins with is no marker of its own
            literals += tuple(each for each in self._format.markers if not any(map(str.startswith, literals, [each])))
        literals += ("{",) if is_bare else ()
        self._pattern = re.compile("|".join(map(re.escape, literals))) if literals else None
        self._prefixes = _prefixes(literals)

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        self._parts = []
        while self._step():
            pass
        return self._parts

    def end(self) -> list[Part]:
        self._parts = []
        rest, self._buffer = self._buffer, ""
        if self._step == self._reasoning:
            self._reason(rest)
        elif self._form.forced:
            pass
        elif self._step == self._object and self._call is not None and not self._call.shown:
            self._say(self._opener + self._call.raw)
        elif self._step == self._calls_in_python:
            self._say(self._python_text + rest)
        elif self._step in (self._opened, self._name, self._region):
            self._say(self._opener + rest)
        elif self._step == self._text:
            self._say(rest)
        if self._space and not self.num_calls:
            self._parts.append(TextPart(self._space))
        return self._parts

    def _reasoning(self) -> bool:
        begin, found, rest = self._buffer.partition(self._think_end)
        if found:
            self._reason(begin.rstrip("\n"))
            self._buffer, self._step = rest, self._text
            self._behind_reasoning = True
            return True
        # A line break before the end is not shown.
        ready = self._buffer[: len(self._buffer) - _held(self._buffer, self._think_prefixes)].rstrip("\n")
        self._reason(ready)
        self._buffer = self._buffer[len(ready) :]
        return False

    def _reason(self, text: str) -> None:
        text = text if self._has_reasoned else text.lstrip("\n")
        self._has_reasoned = self._has_reasoned or bool(text)
        if text and self._form.shows_reasoning:
            self._parts.append(ReasoningPart(text))

    def _text(self) -> bool:
        if self._behind_call:
            return self._next_call()
        if self._behind_reasoning:
            self._buffer = self._buffer.lstrip("\n")
            self._behind_reasoning = not self._buffer
        if self._may_be_python:
            begun = CALLS.match(self._buffer)
            if begun is not None:
                self._python_text, self._buffer = self._buffer[: begun.end()], self._buffer[begun.end() :]
                self._python, self._step = PythonEnd(), self._calls_in_python
                return True
            if len(self._buffer) < _MAX_HEADER and (not self._buffer.strip() or MAYBE_CALLS.fullmatch(self._buffer)):
                return False
        found = self._pattern.search(self._buffer) if self._pattern else None
        if found is None:
            held = _held(self._buffer, self._prefixes)
            ready, self._buffer = self._buffer[: len(self._buffer) - held], self._buffer[len(self._buffer) - held :]
            self._say(ready)
            return False
        self._say(self._buffer[: found.start()])
        self._buffer = self._buffer[found.end() :]
        return self._literal(found[0])

    @property
    def _may_be_python(self) -> bool:
        return self._format.style == "pythonic" and bool(self._form.tools) and not self._has_text

    def _literal(self, literal: str) -> bool:
        if literal == self._think_begin:
            if self._has_text or self.num_calls:
                self._say(literal)
            else:
                self._space, self._step = "", self._reasoning
        elif literal == "{":
            self._begin_object("")
        elif literal in self._format.openers:
            self._opener, self._step = literal, self._region if self._format.closer else self._opened
            self._searched = 0
        return True  # any other is dropped

    def _region(self) -> bool:
        """Reads on behind an opener whose calls are read whole."""
        end = self._buffer.find(self._format.closer, self._searched)
        if end < 0:
            self._searched = max(0, len(self._buffer) - len(self._format.closer))
            return False
        found = read_region(self._format.style, self._buffer[:end], self._form)
        self._step = self._text
        if found is None:
            self._say(self._opener)
            return True
        self._buffer = self._buffer[end + len(self._format.closer) :]
        for name, arguments in found:
            index = self.num_calls
            self._show([CallStart(index, name), CallArguments(index, arguments), CallEnd(index)])
        self._behind_call = True
        return True

    def _begin_object(self, opener: str) -> None:
        """``buffer`` lacks the brace, which has been read."""
        self._opener = opener
        self._call = ObjectCall(self.num_calls, self._accepts)
        self._buffer, self._step = "{" + self._buffer, self._object

    def _accepts(self, name: str) -> bool:
        return bool(self._format.openers) or name in self._form.tools

    def _opened(self) -> bool:
        """Behind an opener: a JSON object, a list of them, or a name."""
        rest = self._buffer.lstrip(" \t\r\n[" if self._format.style == "object" else " \t\r\n")
        if not rest:
            return False
        if rest[0] == "{" and self._format.style == "object":
            self._buffer = rest[1:]
            self._begin_object(self._opener)
        elif self._format.name_pattern:
            self._step = self._name
        else:
            self._say(self._opener)
            self._step = self._text
        return True

    def _object(self) -> bool:
        assert self._call is not None
        text, self._buffer = self._buffer, ""
        parts, rest = self._call.push(text)
        self._show(parts)
        if self._call.state == "open":
            return False
        self._buffer, self._step = rest, self._text
        if self._call.state == "failed":
            self._say(self._opener + self._call.raw)
        else:
            self._behind_call = True
        return True

    def _name(self) -> bool:
        begin = self._buffer.find("{")
        if begin < 0 and len(self._buffer) <= _MAX_HEADER:
            return False
        found = re.fullmatch(self._format.name_pattern, self._buffer[: max(begin, 0)])
        if found is None:
            self._say(self._opener)
            self._step = self._text
            return True
        self._show([CallStart(self.num_calls, found[1])])
        self._buffer = self._buffer[begin:]
        self._value, self._step = JsonEnd(), self._arguments
        return True

    def _arguments(self) -> bool:
        end = self._value.find(self._buffer)
        text = self._buffer if end < 0 else self._buffer[:end]
        self._buffer = self._buffer[len(text) :]
        if text:
            self._parts.append(CallArguments(self.num_calls - 1, text))
        if end >= 0:
            self._parts.append(CallEnd(self.num_calls - 1))
            self._step, self._behind_call = self._text, True
        return end >= 0

    def _next_call(self) -> bool:
        """Behind a call: another one of the same list, or text again."""
        self._buffer = self._buffer.lstrip(_BETWEEN)
        if not self._buffer:
            return False
        self._behind_call = False
        if self._format.style == "object" and self._buffer[0] == "{":
            self._buffer = self._buffer[1:]
            self._begin_object("")
        return True

    def _calls_in_python(self) -> bool:
        end = self._python.find(self._buffer)
        self._python_text += self._buffer if end < 0 else self._buffer[:end]
        if end < 0:
            self._buffer = ""
            return False
        self._buffer = self._buffer[end:]
        found = read_call(self._python_text.lstrip(" \t\r\n[,"))
        text, self._python_text = self._python_text, ""
        if found is None or found[0] not in self._form.tools:
            self._say(text)
            self._step = self._text
            return True
        index = self.num_calls
        self._show([CallStart(index, found[0]), CallArguments(index, found[1]), CallEnd(index)])
        self._python, self._step = PythonEnd(), self._behind_python
        return True

    def _behind_python(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest[0] == ",":
            self._buffer, self._step = rest[1:], self._calls_in_python
        else:
            self._buffer, self._step = rest.removeprefix("]"), self._text
            self._behind_call = True
        return True

    def _show(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if isinstance(part, CallStart):
                self.num_calls += 1
                self._has_text = True
            self._parts.append(part)

    def _say(self, text: str) -> None:
        shown = (self._space + text).rstrip() if self._form.tools else self._space + text
        self._space = (self._space + text)[len(shown) :]
        if shown:
            self._has_text = True
            self._parts.append(TextPart(shown))


def _prefixes(literals: Iterable[str]) -> frozenset[str]:
    """All beginnings of the literals that are not the whole."""
    return frozenset(literal[:length] for literal in literals for length in range(1, len(literal)))


def _held(text: str, prefixes: frozenset[str]) -> int:
    """Characters at the end of a text that may be the beginning of a literal."""
    longest = max(map(len, prefixes), default=0)
    return next((length for length in range(min(longest, len(text)), 0, -1) if text[-length:] in prefixes), 0)
