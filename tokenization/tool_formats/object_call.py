"""Reads a call that is one JSON object, ``{"name": ..., "arguments": {...}}``, as it is being written, to its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal

from farsight.tokenization.tool_formats.parts import CallArguments, CallEnd, CallStart, Part


class JsonEnd:
    """Finds the end of one JSON object, array or string, which begins with its first character.

    It does not check what stands between the brackets: a grammar or the reader of the value does.
    """

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str, start: int = 0) -> int:
        """The place behind the last character of the value; -1 if the value goes on behind ``text``."""
        for index in range(start, len(text)):
            char = text[index]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
                    if self._depth == 0:
                        return index + 1
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return -1


NAME_KEYS = frozenset(("name", "function"))
ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
_OTHER_KEYS = frozenset(("id", "type"))
_MAX_KEY_CHARS = 64
_SPACE = " \t\r\n"


class ObjectCall:
    """One call. Nothing of it is shown before its name is known and its arguments have begun.

    Args:
        index: Number of the call in its output.
        accepts: Whether a name may be called.

    Attributes:
        state: ``failed`` if the text is no call and nothing of it was shown; ``raw`` is that text then.
    """

    def __init__(self, index: int, accepts: Callable[[str], bool]) -> None:
        self.state: Literal["open", "done", "failed"] = "open"
        self.raw = ""
        self._index = index
        self._accepts = accepts
        self._pending = ""
        self._step: Callable[[], bool] = self._brace
        self._parts: list[Part] = []
        self._key = ""
        self._value = JsonEnd()
        self._text = ""
        self._name = ""
        self._early = ""
        self._shown = False

    @property
    def shown(self) -> bool:
        """Whether its start was shown."""
        return self._shown

    def push(self, text: str) -> tuple[list[Part], str]:
        """Reads further text; returns the parts that are known now, and the text behind the call's end."""
        self.raw += text if not self._shown else ""
        self._pending += text
        self._parts = []
        while self.state == "open" and self._step():
            pass
        if self.state == "open":
            return self._parts, ""
        rest, self._pending = self._pending, ""
        if self.state == "failed":
            self.raw = self.raw[: len(self.raw) - len(rest)]
        return self._parts, rest

    def _fail(self) -> bool:
        """A call that was shown already ends here instead."""
        self.state = "done" if self._shown else "failed"
        return False

    def _skip(self, chars: str) -> str:
        """The next character that is none of these; empty if there is none yet."""
        self._pending = self._pending.lstrip(chars)
        return self._pending[:1]

    def _take(self, count: int) -> str:
        taken, self._pending = self._pending[:count], self._pending[count:]
        return taken

    def _brace(self) -> bool:
        self._take(1)
        self._step = self._key_start
        return True

    def _key_start(self) -> bool:
        char = self._skip(_SPACE + ",")
        if char == "}":
            self._take(1)
            return self._end()
        if char != '"':
            return bool(char) and self._fail()
        end = JsonEnd().find(self._pending)
        if end < 0:
            return len(self._pending) > _MAX_KEY_CHARS and self._fail()
        self._key = self._pending[1 : end - 1]
        if not self._shown and self._key not in NAME_KEYS | ARGUMENT_KEYS | _OTHER_KEYS:
            return self._fail()
        self._take(end)
        self._step = self._colon
        return True

    def _colon(self) -> bool:
        char = self._skip(_SPACE)
        if char != ":":
            return bool(char) and self._fail()
        self._take(1)
        self._step = self._value_start
        return True

    def _value_start(self) -> bool:
        char = self._skip(_SPACE)
        if not char:
            return False
        self._value, self._text = JsonEnd(), ""
        if char == "{" and self._key in ARGUMENT_KEYS:
            inner = self._pending[1:].lstrip(_SPACE)[:1]
            if inner not in ('"', "}"):
                return bool(inner) and self._fail()
            self._step = self._arguments
        else:
            self._step = self._whole_value if char in '{["' else self._scalar
        return True

    def _arguments(self) -> bool:
        end = self._value.find(self._pending)
        text = self._take(end if end >= 0 else len(self._pending))
        if self._name:
            self._show(text, is_whole=end >= 0)
        else:
            self._early += text
        self._step = self._key_start if end >= 0 else self._arguments
        return end >= 0

    def _whole_value(self) -> bool:
        end = self._value.find(self._pending)
        self._text += self._take(end if end >= 0 else len(self._pending))
        return end >= 0 and self._keep_value()

    def _scalar(self) -> bool:
        ends = [place for place in map(self._pending.find, ",}") if place >= 0]
        self._text += self._take(min(ends, default=len(self._pending)))
        return bool(ends) and self._keep_value()

    def _keep_value(self) -> bool:
        self._step = self._key_start
        if self._key in NAME_KEYS or self._key in ARGUMENT_KEYS:
            try:
                value = json.loads(self._text)
            except (ValueError, RecursionError):
                return self._fail()
            return self._keep_name(value) if self._key in NAME_KEYS else self._keep_arguments(value)
        return True

    def _keep_name(self, value: object) -> bool:
        if not isinstance(value, str) or not value or not self._accepts(value):
            return self._fail()
        self._name = value
        if self._early:
            self._show(self._early, is_whole=True)
        return True

    def _keep_arguments(self, value: object) -> bool:
        """Arguments that are no object: a JSON text inside of a string, or nothing."""
        text = value if isinstance(value, str) and value.strip() else "{}" if not value else self._text
        if self._name:
            self._show(text, is_whole=True)
        else:
            self._early = text
        return True

    def _show(self, text: str, *, is_whole: bool) -> None:
        if not self._shown:
            self._shown = True
            self._parts.append(CallStart(self._index, self._name))
        if text:
            self._parts.append(CallArguments(self._index, text))
        if is_whole:
            self._parts.append(CallEnd(self._index))

    def _end(self) -> bool:
        if not self._name:
            return self._fail()
        if not self._shown:
            self._show("{}", is_whole=True)
        self.state = "done"
        return False
