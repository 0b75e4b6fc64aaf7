"""The bytes that single tokens stand for: a token may be a part of a character."""

from __future__ import annotations

import re

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


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
