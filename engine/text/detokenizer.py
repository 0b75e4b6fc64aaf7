"""From tokens to the text that a client may see, one token at a time.

Two things hold text back: a character whose bytes are incomplete, and a tail that may be the beginning of a stop
string.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from engine.text.stop_strings import StopStrings
from tokenization.text_stream import TextDecoder, TextStream


class Detokenizer:
    """Starts the text of each sequence; one per tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = TextDecoder(tokenizer)
        self.special_ids = self._decoder.special_ids

    def start(self, stop: Sequence[str] = (), prompt_ids: Sequence[int] = ()) -> OutputText:
        """The text of an output that ends before the first of the ``stop`` strings and follows ``prompt_ids``."""
        return OutputText(self._decoder.start(prompt_ids), stop)


class OutputText:
    """The text of one output; ``StopStrings`` says where a stop string ends it."""

    __slots__ = ("_stop", "_stream")

    def __init__(self, stream: TextStream, stop: Sequence[str]) -> None:
        self._stream = stream
        self._stop = StopStrings(stop) if stop else None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stop is not None and self._stop.stopped

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Adds a token; returns the text that the client may see now, possibly none.

        Args:
            may_stop: Whether a stop string that this token completes ends the text.
        """
        if self._stop is None:
            return self._stream.push(token_id)
        if self._stop.stopped:
            return ""
        text = self._stream.push(token_id)
        return self._stop.push(text, may_stop) if text else ""

    def flush(self) -> str:
        """The text still held back, when the output has ended; half a character becomes U+FFFD."""
        if self._stop is None:
            return self._stream.flush()
        if self._stop.stopped:
            return ""
        rest = self._stream.flush()
        shown = self._stop.push(rest) if rest else ""
        return shown + self._stop.flush()
