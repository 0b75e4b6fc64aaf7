"""The bytes that single tokens stand for; many tokens are parts of a character."""

from __future__ import annotations

from tokenizers import Tokenizer

from tokenization.text_stream import byte_level_bytes, fallback_byte, is_byte_level

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
