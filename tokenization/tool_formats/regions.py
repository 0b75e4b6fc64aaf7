"""Reads calls that stand whole between two markers and are not JSON: those of Qwen 3.5, GLM 4.5, Gemma 4 and LFM 2.

``<tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>`` is a call of Qwen,
``<tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>`` one of GLM, and
``<|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>`` one of Gemma; LFM's are those of Python. Values in tags are texts
where the tool takes a text, and JSON elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from farsight.tokenization.tool_formats.parts import OutputForm
from farsight.tokenization.tool_formats.pythonic import PythonEnd, read_call

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_KEYED = re.compile(r"\s*([^\s<]+)\s*(.*)", re.DOTALL)
_KEY = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_GEMMA = re.compile(r"\s*call:([^\s{]+)\s*(?=\{)")
_QUOTE = '<|"|>'
_WORD = re.compile(r"[^,:{}\[\]<]*")
_PYTHON = {"True": True, "False": False, "None": None}
_MAX_DEPTH = 64

Calls = list[tuple[str, str]]
"""Name and arguments, as JSON text, of each."""


def is_text(schema: Any) -> bool:
    """Returns whether a value of this JSON Schema is a text, and nothing else."""
    if not isinstance(schema, dict):
        return False
    known = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return schema.get("type") == "string" or ("type" not in schema and bool(known) and all(map(_is_str, known)))


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def text_arguments(tool: str, parameters: Any) -> list[tuple[str, str]]:
    """Returns ``OutputForm.texts`` of one tool, by the JSON Schema of its arguments."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    pairs = properties.items() if isinstance(properties, dict) else ()
    return [(tool, name) for name, schema in pairs if is_text(schema)]


def read_region(style: str, text: str, form: OutputForm) -> Calls | None:
    """Returns the calls between two markers; None if the text is none."""
    try:
        return _READERS[style](text, form)
    except (ValueError, IndexError, RecursionError):
        return None


def _qwen(text: str, form: OutputForm) -> Calls:
    found = _FUNCTION.fullmatch(text)
    if found is None:
        raise ValueError("no function")
    return [_tagged(found[1], _PARAMETER.findall(found[2]), form)]


def _glm(text: str, form: OutputForm) -> Calls:
    found = _KEYED.fullmatch(text)
    if found is None:
        raise ValueError("no name")
    return [_tagged(found[1], _KEY.findall(found[2]), form)]


def _tagged(name: str, pairs: Iterable[tuple[str, str]], form: OutputForm) -> tuple[str, str]:
    arguments = {key: value if (name, key) in form.texts else _value(value.strip(), value) for key, value in pairs}
    return name, json.dumps(arguments, ensure_ascii=False)


def _value(text: str, otherwise: str) -> Any:
    """Returns what JSON or a word of Python says; any other text is itself."""
    try:
        return _PYTHON[text] if text in _PYTHON else json.loads(text)
    except ValueError:
        return otherwise


def _gemma(text: str, _form: OutputForm) -> Calls:
    found = _GEMMA.match(text)
    if found is None:
        raise ValueError("no call")
    reader = _GemmaReader(text, found.end())
    arguments = reader.value(0)
    if text[reader.at :].strip():
        raise ValueError("text behind the call")
    return [(found[1], json.dumps(arguments, ensure_ascii=False))]


class _GemmaReader:
    """Raises ValueError or IndexError where the text is not what it should be."""

    def __init__(self, text: str, at: int) -> None:
        self._text, self.at = text, at

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        self._spaces()
        match self._text[self.at]:
            case "{":
                return dict(self._items("}", depth))
            case "[":
                return list(self._items("]", depth))
        if self._text.startswith(_QUOTE, self.at):
            return self._quoted()
        word = self._word()
        return _value(word, word)

    def _items(self, closing: str, depth: int) -> Iterable[Any]:
        self.at += 1
        while self._next() != closing:
            if closing == "]":
                yield self.value(depth + 1)
            else:
                key = self._quoted() if self._text.startswith(_QUOTE, self.at) else self._word()
                self._expect(":")
                yield key, self.value(depth + 1)
            if self._next() != closing:
                self._expect(",")
        self.at += 1

    def _quoted(self) -> str:
        begin = self.at + len(_QUOTE)
        end = self._text.index(_QUOTE, begin)
        self.at = end + len(_QUOTE)
        return self._text[begin:end]

    def _word(self) -> str:
        begin, self.at = self.at, _WORD.match(self._text, self.at).end()  # type: ignore[union-attr]  # matches nothing too
        word = self._text[begin : self.at].strip()
        if not word:
            raise ValueError("a word expected")
        return word

    def _spaces(self) -> None:
        while self._text[self.at].isspace():
            self.at += 1

    def _next(self) -> str:
        self._spaces()
        return self._text[self.at]

    def _expect(self, char: str) -> None:
        if self._next() != char:
            raise ValueError(f"{char} expected")
        self.at += 1


def _python(text: str, _form: OutputForm) -> Calls:
    calls: Calls = []
    rest = text.strip().removeprefix("[")
    while rest := rest.lstrip(" \t\r\n,"):
        end = PythonEnd().find(rest)
        call = read_call(rest[:end]) if end > 0 else None
        if call is None:
            if calls and rest == "]":
                return calls
            raise ValueError("no call in Python")
        calls.append(call)
        rest = rest[end:]
    return calls


_READERS = {"tags": _qwen, "keys": _glm, "gemma": _gemma, "python": _python}
