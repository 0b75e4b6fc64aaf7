"""Text from tokens, one token at a time, in time linear in their number; and the bytes that single tokens stand for.

The text of a whole output is what ``Tokenizer.decode`` gives for all its tokens at once. A token is looked at when it
comes and decoded together with two tokens before it at most, so a step's work has a bound: the tokens of one
character, which are four at most in UTF-8.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Sequence
from typing import Protocol

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
_ANCHOR_WORDS = ("▁a", "a", "A", "▁the", "the", "▁x", "x")
_MAX_FIRST = 4
"""Tokens without text that are kept as context at the beginning of a text."""

Ids = tuple[int, ...]


class TextStream(Protocol):
    """The text of one sequence of tokens."""

    def push(self, token_id: int) -> str:
        """Text that this token completes, possibly none."""
        ...

    def flush(self) -> str:
        """The rest of the text, when the tokens have ended: U+FFFD for a character that is not complete."""
        ...


class TextDecoder:
    """Starts text streams; one per tokenizer.

    Attributes:
        special_ids: Ids of tokens that are no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special_ids = special_ids(tokenizer)
        self._byte_fallback = has_byte_fallback(tokenizer)
        self._byte_level = is_byte_level(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self._byte_of: dict[int, bytes | None] = {}
        self._anchored: dict[Ids, str] = {}
        self._anchor: Ids | None = None

    def start(
        self, context: Sequence[int] = (), *, shows_special: bool = False, shown: Collection[int] = ()
    ) -> TextStream:
        """A stream of the text that follows the tokens of ``context``.

        Args:
            context: Tokens before, which are not part of the text. Where they are a text themselves, the decoder
                does not drop a leading space as it does at the beginning of a text.
            shows_special: Whether special tokens are text.
            shown: Special tokens that are text nevertheless.
        """
        hidden = frozenset() if shows_special else self.special_ids.difference(shown)
        if self._byte_level:
            return _ByteStream(self, hidden)
        follows = any(token_id not in hidden for token_id in reversed(context))
        return _PartStream(self, hidden, follows)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a byte-level token; nothing for an id that only pads the model's vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = byte_level_bytes(self.tokenizer.id_to_token(token_id) or "")
        return found

    def byte_of(self, token_id: int) -> bytes | None:
        """The byte of a byte-fallback token; empty for any other token, None for an id of no token."""
        if token_id in self._byte_of:
            return self._byte_of[token_id]
        token = self.tokenizer.id_to_token(token_id)
        found = None
        if token:
            found = (self._byte_fallback and fallback_byte(token)) or b""
        self._byte_of[token_id] = found
        return found

    def anchored(self, part: Ids) -> str:
        """The text of a part after the anchor; remembered for single tokens."""
        found = self._anchored.get(part)
        if found is None:
            found = self.decode(self.anchor + part)
            if len(part) <= 1:
                self._anchored[part] = found
        return found

    @property
    def anchor(self) -> Ids:
        """A token with visible text, decoded before others so that those are not at the beginning of a text."""
        if self._anchor is None:
            self._anchor = self._find_anchor()
        return self._anchor

    def _find_anchor(self) -> Ids:
        words = (self.tokenizer.token_to_id(word) for word in _ANCHOR_WORDS)
        for token_id in (*words, *range(self.tokenizer.get_vocab_size())):
            if token_id is None or token_id in self.special_ids or self.byte_of(token_id):
                continue
            text = self.decode((token_id,))
            if text.strip() and _REPLACEMENT not in text and self.decode((token_id, token_id)).startswith(text):
                return (token_id,)
        return ()

    def decode(self, token_ids: Ids) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False)) if token_ids else ""


class _ByteStream:
    """Text of a byte-level tokenizer: the bytes of its tokens, decoded as they come."""

    def __init__(self, decoder: TextDecoder, hidden: frozenset[int]) -> None:
        self._bytes_of = decoder.bytes_of
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in self._hidden else self._utf8.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PartStream:
    """Text of any other tokenizer, in parts: a token, or the byte tokens of one character.

    A part's text is what it adds to the text of the part before it. Bytes that are no character each become U+FFFD, at
    once; ``Tokenizer.decode`` would take back good characters beside them, which a client has got already.
    """

    def __init__(self, decoder: TextDecoder, hidden: frozenset[int], follows: bool) -> None:
        self._decoder = decoder
        self._hidden = hidden
        self._last: Ids | None = () if follows else None  # the part before; None at the beginning of a text
        self._first: Ids = ()  # all parts there, as long as they have no text
        self._pending: list[int] = []  # byte tokens of a character that is not complete
        self._pending_bytes = b""

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        byte = self._decoder.byte_of(token_id)
        if byte is None:
            return ""
        return self._push_byte(token_id, byte) if byte else self.flush() + self._text_of((token_id,))

    def flush(self) -> str:
        return self._give_up() if self._pending else ""

    def _push_byte(self, token_id: int, byte: bytes) -> str:
        text = ""
        state = _state_of(self._pending_bytes + byte)
        if state is None and self._pending:  # the byte may begin a character by itself
            text = self._give_up()
            state = _state_of(byte)
        self._pending.append(token_id)
        self._pending_bytes += byte
        if state is None:
            return text + self._give_up()
        if not state:
            return text
        part = tuple(self._pending)
        self._forget()
        return text + self._text_of(part)

    def _give_up(self) -> str:
        """The pending bytes are no character and never will be one."""
        text = _REPLACEMENT * len(self._pending)
        self._forget()
        self._last = ()
        return text

    def _forget(self) -> None:
        self._pending = []
        self._pending_bytes = b""

    def _text_of(self, part: Ids) -> str:
        """Text that a part adds to the text before it."""
        decoder, last = self._decoder, self._last
        if last is None:
            self._first = (self._first + part)[-_MAX_FIRST:]
            text = decoder.decode(self._first)
            self._last = part if text else None
            return text
        self._last = part
        before, whole = decoder.anchored(last), decoder.decode(decoder.anchor + last + part)
        return whole[len(before) :] if whole.startswith(before) else decoder.decode(part)


def _state_of(data: bytes) -> bool | None:
    """Whether the bytes are one character of UTF-8; False if more bytes can make one of them, None if none can."""
    try:
        text = codecs.utf_8_decode(data, "strict", False)[0]
    except UnicodeDecodeError:
        return None
    return bool(text)


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the special tokens, which are no text."""
    return frozenset(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def decoder_state(tokenizer: Tokenizer) -> bytes:
    """The decoder as JSON; empty if there is none."""
    return b"" if tokenizer.decoder is None else bytes(tokenizer.decoder.__getstate__())


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the characters of its tokens stand for bytes, as GPT-2's do."""
    return b'"ByteLevel"' in decoder_state(tokenizer)


def has_byte_fallback(tokenizer: Tokenizer) -> bool:
    """Whether tokens such as ``<0xE2>`` stand for bytes, as Llama 2's do."""
    return b'"ByteFallback"' in decoder_state(tokenizer)


def fallback_byte(token: str) -> bytes | None:
    """The byte of a token such as ``<0xE2>``; None of any other token."""
    found = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else None


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; one with a character outside the alphabet is text as it stands."""
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
    except KeyError:
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a printable byte is the character of its number; the others follow from 256 on, in order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {char: byte for byte, char in chars.items()}


_BYTE_OF_CHAR = _byte_level_alphabet()


_WORD_START = "\u2581"


class TokenBytes:
    """The bytes of every token of one tokenizer, remembered once asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._byte_level = is_byte_level(tokenizer)
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """UTF-8, or a part of it; nothing for an id that only pads the model's vocabulary."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._added.get(token_id) or self._decode(token_id)
        return found

    def _decode(self, token_id: int) -> bytes:
        component = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_level:
            return byte_level_bytes(component)
        return fallback_byte(component) or component.replace(_WORD_START, " ").encode()
