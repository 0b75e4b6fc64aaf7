"""Outputs as clients get them: text, reasoning and calls of tools, whole or as the deltas of a stream.

And log probabilities, in the two shapes of OpenAI's API: completions and chats.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from farsight.core.messages.tokens import TokenLogprobs
from farsight.services.api.generation import Echo
from farsight.services.api.text.dialect import TokenTexts
from farsight.tokenization.tool_formats.parser import parser_of
from farsight.tokenization.tool_formats.parts import (
    CallArguments,
    CallStart,
    OutputForm,
    ReasoningPart,
    SentCalls,
    SentPart,
    TextPart,
)

_SHORT_IDS = ("mistral", "mistral-args")
"""Their templates take ids of nine letters and digits alone."""


class ChoiceParts:
    """Takes one choice of an answer apart.

    Args:
        stream: Whether the first call is known while it is being written.
    """

    def __init__(self, form: OutputForm, response_id: str, choice: int, *, stream: bool) -> None:
        self._form = form
        self._answer = f"{response_id}/{choice}"
        self._parser = parser_of(form)
        # The text that a custom tool takes is known once its call is whole.
        self._calls = SentCalls(parallel=form.parallel, as_written=stream and not form.custom)
        self._custom: set[int] = set()

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    def read(self, text: str, *, ended: bool) -> list[SentPart]:
        """Returns the parts that further text makes known; neighbours of one kind are one."""
        parts = self._parser.feed(text)
        if ended:
            parts = [*parts, *self._parser.end()]
        return [self._of_custom(part) for part in _merged(self._calls.read(parts))]

    def _of_custom(self, part: SentPart) -> SentPart:
        """Puts the text that a custom tool takes in the place of its arguments."""
        if isinstance(part, CallStart) and part.name in self._form.custom:
            self._custom.add(part.index)
        if isinstance(part, CallArguments) and part.index in self._custom:
            return CallArguments(part.index, _input_of(part.text))
        return part

    def is_custom(self, index: int) -> bool:
        """Tells whether a call is one of a tool that takes a text."""
        return index in self._custom

    def deltas(self, text: str, *, ended: bool) -> list[dict[str, Any]]:
        """Returns what ``read`` does, as the deltas of a chat's stream."""
        return [self._delta(part) for part in self.read(text, ended=ended)]

    def _delta(self, part: SentPart) -> dict[str, Any]:
        match part:
            case TextPart():
                return {"content": part.text}
            case ReasoningPart():
                return {"reasoning_content": part.text}
            case CallStart():
                kind, field = ("custom", "input") if self.is_custom(part.index) else ("function", "arguments")
                call = {"index": part.index, "id": self.id_of(part), "type": kind, kind: {"name": part.name, field: ""}}
                return {"tool_calls": [call]}
            case CallArguments():
                kind, field = ("custom", "input") if self.is_custom(part.index) else ("function", "arguments")
                return {"tool_calls": [{"index": part.index, kind: {field: part.text}}]}

    def id_of(self, start: CallStart) -> str:
        """Returns the id of a call; the same at every replica that writes the answer."""
        digest = hashlib.blake2b(f"{self._answer}/{start.index}".encode(), digest_size=12).hexdigest()
        return digest[:9] if self._form.format in _SHORT_IDS else f"call_{digest}"

    def finish_reason(self, reason: str | None) -> str | None:
        """Returns the reason that the client is told: an output that has ended with calls wants their results."""
        return "tool_calls" if reason == "stop" and self.num_calls else reason


def _input_of(arguments: str) -> str:
    """Returns the one argument of a custom tool; what a model has written in another form is told as it is."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _merged(parts: list[SentPart]) -> list[SentPart]:
    merged: list[SentPart] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, TextPart) and isinstance(last, TextPart):
            merged[-1] = TextPart(last.text + part.text)
        elif isinstance(part, ReasoningPart) and isinstance(last, ReasoningPart):
            merged[-1] = ReasoningPart(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and last.index == part.index:
            merged[-1] = CallArguments(part.index, last.text + part.text)
        else:
            merged.append(part)
    return merged


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
        """Returns four lists with one item per token. Offsets count characters; a token that completes no character
        has the offset of the next token.

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
        """Returns the most likely tokens, best first, and the sampled token if it is not among them."""
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
    """Leaves out the likeliest tokens that the engine has computed for another purpose."""
    return [(ids[: 1 + num_top], values[: 1 + num_top]) for ids, values in entries]


def prompt_logprobs(
    texts: TokenTexts, entries: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Shows them as vLLM does: for each token but the first, by id, itself and the likeliest.

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
    """Returns the ``logprobs`` of a choice of a chat, or of a chunk of one."""
    content = []
    for ids, values in entries:
        top = [_chat_token(texts, token_id, value) for token_id, value in zip(ids[1:], values[1:], strict=True)]
        content.append({**_chat_token(texts, ids[0], values[0]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text(token_id), "logprob": logprob, "bytes": list(texts.data(token_id))}
