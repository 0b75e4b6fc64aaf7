"""Follows the JSON text of a value, character by character, to where it ends."""

from __future__ import annotations


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
