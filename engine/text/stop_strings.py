"""Stop strings in a text that comes in parts, found in time linear in the text and in the number of strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Holds back the end of a text while it may be the beginning of a stop string.

    The stop string that is complete first ends the text (of those complete at the same character the longest), so
    the result does not depend on how the text is cut into parts.

    Attributes:
        stopped: Whether a stop string has ended the text.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._matches = [_Match(each) for each in stop]
        self._held: deque[str] = deque()
        self._num_held = 0
        self.stopped = False

    def push(self, text: str, may_stop: bool = True) -> str:
        """Adds text; returns the text that the client may see now.

        Args:
            may_stop: Whether a stop string that is completed within ``text`` ends it.
        """
        for index, char in enumerate(text):
            longest = 0
            for match in self._matches:
                longest = max(longest, match.advance(char))
            if longest and may_stop:
                self.stopped = True
                return self._release(text[: index + 1], longest)
        return self._release(text, max(match.length for match in self._matches))

    def flush(self) -> str:
        """The text held back, when the text has ended."""
        return "" if self.stopped else self._release("", 0)

    def _release(self, text: str, num_kept: int) -> str:
        """Returns the held text and ``text``, without the last characters, which stay held."""
        if text:
            self._held.append(text)
            self._num_held += len(text)
        shown = []
        while self._num_held > num_kept:
            part = self._held.popleft()
            excess = self._num_held - num_kept
            if len(part) > excess:
                self._held.appendleft(part[excess:])
                part = part[:excess]
            shown.append(part)
            self._num_held -= len(part)
        return "".join(shown)


class _Match:
    """How much of one stop string the text ends with: the automaton of Knuth, Morris and Pratt, built as it is needed.

    Attributes:
        length: Characters of the stop string that the text ends with, fewer than all of them.
    """

    __slots__ = ("_borders", "_stop", "length")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = [0]  # by length - 1: longest proper suffix of that prefix that is a prefix too
        self.length = 0

    def advance(self, char: str) -> int:
        """The length of the stop string if it is complete with this character, else 0."""
        length = self._next(self.length, char)
        if length == len(self._stop):
            self.length = self._border(length)
            return length
        self.length = length
        return 0

    def _next(self, length: int, char: str) -> int:
        stop = self._stop
        while length and stop[length] != char:
            length = self._border(length)
        return length + 1 if stop[length] == char else 0

    def _border(self, length: int) -> int:
        borders = self._borders
        while len(borders) < length:
            borders.append(self._next(borders[-1], self._stop[len(borders)]))
        return borders[length - 1]
