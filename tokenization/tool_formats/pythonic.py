"""Reads calls as Python writes them, ``[weather(city="Rome", days=3)]``, without running anything."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_NAME = re.compile(r"\s*([A-Za-z_][\w.\-]*)\s*")
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_MAX_DEPTH = 64

MAYBE_CALLS = re.compile(r"\s*\[\s*(?:[A-Za-z_][\w.\-]*\s*)?")
"""The beginning of an output that may yet become calls."""

CALLS = re.compile(r"\s*\[\s*(?=[A-Za-z_][\w.\-]*\s*\()")
"""The beginning of an output that is calls."""


class PythonEnd:
    """Finds the parenthesis that closes a call."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def find(self, text: str) -> int:
        """The place behind it; -1 if the call goes on behind ``text``. The next text continues this one."""
        for index, char in enumerate(text):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return -1


def read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments (as JSON text) of one call; None if it is none.

    Example:
        >>> read_call("f(a=1, b=['x', True])")
        ('f', '{"a": 1, "b": ["x", true]}')
    """
    try:
        return _Reader(text).call()
    except (ValueError, IndexError, RecursionError):
        return None


class _Reader:
    """Raises ValueError or IndexError where the text is not what it should be."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def call(self) -> tuple[str, str]:
        name = self._match(_NAME)[1]
        self._expect("(")
        arguments: dict[str, Any] = {}
        while self._next() != ")":
            key = self._match(_NAME)[1]
            self._expect("=")
            arguments[key] = self._value(0)
            self._comma(")")
        self._at += 1
        if self._text[self._at :].strip():
            raise ValueError("text behind the call")
        return name, json.dumps(arguments, ensure_ascii=False)

    def _next(self) -> str:
        while self._text[self._at].isspace():
            self._at += 1
        return self._text[self._at]

    def _expect(self, char: str) -> None:
        if self._next() != char:
            raise ValueError(f"{char} expected")
        self._at += 1

    def _comma(self, closing: str) -> None:
        if self._next() != closing:
            self._expect(",")

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise ValueError(f"no {pattern.pattern}")
        self._at = found.end()
        return found

    def _value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        match self._next():
            case "'" | '"':
                text: str = ast.literal_eval(self._match(_STRING)[0].replace("\n", "\\n"))
                return text
            case "[":
                return self._items("]", depth)
            case "(":
                return self._items(")", depth)
            case "{":
                return self._dict(depth)
        number = _NUMBER.match(self._text, self._at)
        if number is not None:
            self._at = number.end()
            return float(number[0]) if set(number[0]) & set(".eE") else int(number[0])
        return _WORDS[_known(self._match(_NAME)[1])]

    def _items(self, closing: str, depth: int) -> list[Any]:
        self._at += 1
        items = []
        while self._next() != closing:
            items.append(self._value(depth + 1))
            self._comma(closing)
        self._at += 1
        return items

    def _dict(self, depth: int) -> dict[str, Any]:
        self._at += 1
        found = {}
        while self._next() != "}":
            key = self._value(depth + 1)
            if not isinstance(key, str):
                raise ValueError("a key that is no string")
            self._expect(":")
            found[key] = self._value(depth + 1)
            self._comma("}")
        self._at += 1
        return found


def _known(word: str) -> str:
    if word not in _WORDS:
        raise ValueError(f"{word} is no literal")
    return word
