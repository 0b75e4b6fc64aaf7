"""From tokens to the text that a client may be shown, one token at a time.

Two things hold text back: a character whose bytes are not all there, and a tail that may be the beginning of a
stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from core.errors import InvalidValueError

NUM_CONTEXT_TOKENS = 4
"""Tokens of the prompt that the decoder sees: some decoders drop a space at the very beginning of a text."""

_REPLACEMENT = "\ufffd"


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer in ``model_dir``.

    Raises:
        InvalidValueError: no ``tokenizer.json``, or one that cannot be read.
    """
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise InvalidValueError("model", str(model_dir), "a model directory with a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more special
        raise InvalidValueError("tokenizer.json", str(error), "a file that the tokenizers library reads") from error


class Detokenizer:
    """Starts the text of each sequence; one per tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def start(self, stop: Sequence[str] = (), prompt_ids: Sequence[int] = ()) -> OutputText:
        """The text of an output that ends before the first of the ``stop`` strings and follows ``prompt_ids``."""
        context = list(prompt_ids[-NUM_CONTEXT_TOKENS:])
        if self.tokenizer.decode(context).endswith(_REPLACEMENT):
            context = []  # the prompt ends inside a character: as context it would become output
        return OutputText(self, context, tuple(stop))


class OutputText:
    """The text of one output.

    The stop string that is complete first ends the text (of those complete at the same character the longest), so
    the result does not depend on how the text is cut into tokens.

    Attributes:
        stopped: A stop string has come; there will be no more text.
    """

    __slots__ = ("_detokenizer", "_held", "_max_hold", "_pending", "_stop", "_stream", "stopped")

    def __init__(self, detokenizer: Detokenizer, context_ids: list[int], stop: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stream = DecodeStream(ids=context_ids, skip_special_tokens=True)
        self._pending: list[int] = []  # tokens whose text is not complete
        self._stop = stop
        self._max_hold = max(map(len, stop), default=1) - 1
        self._held = ""  # complete text that may be the beginning of a stop string
        self.stopped = False

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Adds a token; returns the text that may be shown now, possibly none.

        Args:
            may_stop: Whether a stop string that is complete with this token ends the text.
        """
        if self.stopped or token_id in self._detokenizer.special_ids:
            return ""
        text = self._decode(token_id)
        if not text or not self._stop:
            return text
        return self._release(self._held + text, may_stop)

    def flush(self) -> str:
        """The text still held back, when the output has ended; half a character becomes U+FFFD."""
        if self.stopped:
            return ""
        rest = self._held + self._decode_pending()
        self._held = ""
        shown = self._release(rest)
        rest, self._held = self._held, ""
        return shown + rest

    def _decode(self, token_id: int) -> str:
        """The text that this token completes."""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._detokenizer.tokenizer, token_id)
        except Exception:
            # A byte-fallback decoder takes back good characters when bytes that are no UTF-8 follow, and the
            # stream gives up. The text shown stays; what is pending is decoded by itself.
            self._stream = DecodeStream(ids=list(self._pending), skip_special_tokens=True)
            return self._decode_pending()
        if text is None:
            return ""
        self._pending.clear()
        return text

    def _decode_pending(self) -> str:
        text: str = self._detokenizer.tokenizer.decode(self._pending) if self._pending else ""
        self._pending.clear()
        return text

    def _release(self, text: str, may_stop: bool = True) -> str:
        """Cuts ``text`` at a stop string, or holds back its tail; returns what comes before."""
        matches = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches and may_stop:
            self.stopped = True
            self._held = ""
            return text[: min(matches)[1]]
        num_held = self._num_to_hold(text)
        shown = len(text) - num_held
        self._held = text[shown:]
        return text[:shown]

    def _num_to_hold(self, text: str) -> int:
        """Characters of the longest tail that a stop string begins with."""
        for length in range(min(self._max_hold, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
