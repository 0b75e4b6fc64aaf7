"""The prompt of a completion as its client gets it back before the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
