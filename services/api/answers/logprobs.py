"""Log probabilities in the two shapes that OpenAI's API has for them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from core.messages.tokens import TokenLogprobs
from services.api.text.token_texts import TokenTexts


class CompletionLogprobs:
    """The ``logprobs`` of one choice of a completion, part by part."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """Four lists, one item a token. Offsets count characters; what is no text of its own has that of the next."""
        name = self._texts.name
        return {
            "tokens": [name(ids[0]) for ids, _ in entries],
            "token_logprobs": [values[0] if values else None for _, values in entries],
            "top_logprobs": [self._top(ids, values) for ids, values in entries],
            "text_offset": [self._advance(ids[0]) for ids, _ in entries],
        }

    def _top(self, ids: tuple[int, ...], values: tuple[float, ...]) -> dict[str, float] | None:
        """The likeliest, best first, and the token itself if it is not among them."""
        if not values:
            return None
        found: dict[str, float] = {}
        for token_id, value in zip((*ids[1:], ids[0]), (*values[1:], values[0]), strict=True):
            found.setdefault(self._texts.name(token_id), value)
        return found

    def _advance(self, token_id: int) -> int:
        offset = self._offset
        if token_id not in self._texts.special_ids:
            self._offset += len(self._decoder.decode(self._texts.data(token_id)))
        return offset


def chat_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The ``logprobs`` of a choice of a chat, or of a chunk of one."""
    content = []
    for ids, values in entries:
        top = [_chat_token(texts, token_id, value) for token_id, value in zip(ids[1:], values[1:], strict=True)]
        content.append({**_chat_token(texts, ids[0], values[0]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text(token_id), "logprob": logprob, "bytes": list(texts.data(token_id))}
