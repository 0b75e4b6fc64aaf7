"""Log probabilities in the two shapes of OpenAI's API: completions and chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core.messages.tokens import TokenLogprobs
from services.api.generation import Echo
from services.api.text.token_texts import TokenTexts


class CompletionLogprobs:
    """The ``logprobs`` of one choice of a completion, part by part.

    Args:
        echo: The prompt, if the choice's text begins with it.
    """

    def __init__(self, texts: TokenTexts, prompt_ids: Sequence[int], echo: Echo | None = None) -> None:
        self._texts = texts
        self._stream = texts.decoder.start(prompt_ids)
        self._echo = echo
        self._offset = 0 if echo is None else len(echo.text)

    def add(self, output: Sequence[TokenLogprobs], prompt: Sequence[TokenLogprobs] = ()) -> dict[str, list[Any]]:
        """Four lists with one item per token. Offsets count characters; a token that completes no character has the
        offset of the next token.

        Args:
            prompt: All tokens of the echoed prompt, on the first call only.
        """
        name = self._texts.name
        entries = [*prompt, *output]
        echoed = self._echo.offsets if prompt and self._echo is not None else ()
        return {
            "tokens": [name(ids[0]) for ids, _ in entries],
            "token_logprobs": [values[0] if values else None for _, values in entries],
            "top_logprobs": [self._top(ids, values) for ids, values in entries],
            "text_offset": [*echoed, *(self._advance(ids[0]) for ids, _ in output)],
        }

    def _top(self, ids: tuple[int, ...], values: tuple[float, ...]) -> dict[str, float] | None:
        """The most likely tokens, best first, and the sampled token if it is not among them."""
        if not values:
            return None
        found: dict[str, float] = {}
        for token_id, value in zip((*ids[1:], ids[0]), (*values[1:], values[0]), strict=True):
            found.setdefault(self._texts.name(token_id), value)
        return found

    def _advance(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._stream.push(token_id))
        return offset


def likeliest(entries: Sequence[TokenLogprobs], num_top: int) -> list[TokenLogprobs]:
    """Without the likeliest tokens that the engine has computed for another purpose."""
    return [(ids[: 1 + num_top], values[: 1 + num_top]) for ids, values in entries]


def prompt_logprobs(
    texts: TokenTexts, entries: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """As vLLM shows them: for each token but the first, by id, itself and the likeliest.

    Args:
        entries: Those of the prompt's tokens but the first.
    """
    found: list[dict[str, dict[str, Any]] | None] = [None]
    for ids, values in likeliest(entries, num_top):
        ranks = {token_id: rank for rank, token_id in enumerate(ids[1:], 1)}
        found.append(
            {
                str(token_id): {"logprob": value, "rank": ranks.get(token_id), "decoded_token": texts.text(token_id)}
                for token_id, value in zip(ids, values, strict=True)
            }
        )
    return found


def chat_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The ``logprobs`` of a choice of a chat, or of a chunk of one."""
    content = []
    for ids, values in entries:
        top = [_chat_token(texts, token_id, value) for token_id, value in zip(ids[1:], values[1:], strict=True)]
        content.append({**_chat_token(texts, ids[0], values[0]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text(token_id), "logprob": logprob, "bytes": list(texts.data(token_id))}
