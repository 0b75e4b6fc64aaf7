"""What a single token stands for, as text and as bytes: log probabilities name tokens, many of them half characters."""

from __future__ import annotations

import re

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_START = "\u2581"


class TokenTexts:
    """The bytes of every token of one tokenizer, remembered once asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        state = b"" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
        self._bytes_of_char = _byte_level_alphabet() if b'"ByteLevel"' in state else None
        self._known: dict[int, bytes] = {}

    def data(self, token_id: int) -> bytes:
        """UTF-8, or a part of it; nothing for an id that only pads the model's vocabulary."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._added.get(token_id) or self._decode(token_id)
        return found

    def text(self, token_id: int) -> str:
        """U+FFFD stands for bytes that are no character."""
        return self.data(token_id).decode(errors="replace")

    def name(self, token_id: int) -> str:
        """The text, or as OpenAI writes it ``bytes:\\xe2\\x82`` where the bytes alone are none."""
        data = self.data(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _decode(self, token_id: int) -> bytes:
        component = self._tokenizer.id_to_token(token_id) or ""
        if self._bytes_of_char is not None:
            return b"".join(self._bytes_of_char.get(char) or char.encode() for char in component)
        byte = _BYTE_TOKEN.fullmatch(component)
        return bytes([int(byte[1], 16)]) if byte else component.replace(_WORD_START, " ").encode()


def _byte_level_alphabet() -> dict[str, bytes]:
    """GPT-2's: printable bytes are the characters of their numbers, the others those from 256 on, in order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {char: bytes([byte]) for byte, char in chars.items()}
