"""What a client gets back before the output: the prompt of a completion, or the turn that a chat goes on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenization.text_stream import TextDecoder


@dataclass(frozen=True, slots=True)
class Echo:
    """
    Attributes:
        offsets: By token of the prompt, the character of ``text`` that it begins with.
    """

    text: str
    offsets: tuple[int, ...] = ()

    @classmethod
    def of_tokens(cls, decoder: TextDecoder, token_ids: Sequence[int]) -> Echo:
        """All tokens are text here; a token that completes no character has the offset of the next one."""
        stream = decoder.start(shows_special=True)
        texts, offsets, reached = [], [], 0
        for token_id in token_ids:
            offsets.append(reached)
            texts.append(stream.push(token_id))
            reached += len(texts[-1])
        return cls("".join([*texts, stream.flush()]), tuple(offsets))


def last_turn(messages: Sequence[Mapping[str, Any]]) -> tuple[Echo, ...]:
    """The text of a last message of the assistant, whom the answer is by as well; nothing of anybody else's."""
    last = messages[-1]
    text = last.get("content")
    return (Echo(text),) if last["role"] == "assistant" and isinstance(text, str) and text else ()
