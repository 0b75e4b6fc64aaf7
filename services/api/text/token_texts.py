"""What a single token stands for, as text and as bytes: log probabilities name tokens, many of them half characters."""

from __future__ import annotations

import copy

from tokenizers import Tokenizer

from farsight.tokenization.text_stream import TextDecoder, TokenBytes


class TokenTexts:
    """Texts of single tokens of one tokenizer.

    Attributes:
        decoder: Decodes several tokens together.
        data: The bytes of a token: UTF-8, or a part of it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decoder = TextDecoder(tokenizer)
        self.data = TokenBytes(tokenizer).of
        self._names_ids = False

    def named(self, *, by_id: bool) -> TokenTexts:
        """The same, or with names such as ``token_id:5``."""
        if not by_id:
            return self
        names = copy.copy(self)
        names._names_ids = True
        return names

    def text(self, token_id: int) -> str:
        """U+FFFD stands for bytes that are no character."""
        if self._names_ids:
            return f"token_id:{token_id}"
        return self.data(token_id).decode(errors="replace")

    def name(self, token_id: int) -> str:
        """The text, or as OpenAI writes it ``bytes:\\xe2\\x82`` where the bytes alone are none."""
        if self._names_ids:
            return self.text(token_id)
        data = self.data(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
