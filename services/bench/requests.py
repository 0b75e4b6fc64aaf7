"""One request of a workload: how long its prompt and its output are, and where the prompt comes from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

FIRST_ID = 3
"""Lower token ids are special tokens."""

WORDS = ("the", "of", "and", "to", "in", "is", "for", "that", "with", "as", "on", "are", "be", "this", "by", "it")
"""Each is one token in common tokenizers, or nearly."""

_SALT_SHIFT = 32


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a prompt. Parts with the same seed and length hold the same tokens: they are what requests share."""

    seed: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request.

    Attributes:
        id: Its place in the workload, from 0.
        output_tokens: How long the answer is to be.
        parts: What the prompt is made of, if it is drawn.
        text: The prompt, if it is given.
        kind: For a breakdown of the results: ``short``, ``long``, the name of an application; empty if all are alike.
        arrival_s: When it comes after the first one, in a trace.
    """

    id: int
    output_tokens: int
    parts: tuple[Part, ...] = ()
    text: str | None = None
    kind: str = ""
    arrival_s: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """How long a drawn prompt is; 0 for a given text."""
        return sum(part.num_tokens for part in self.parts)

    def prompt_ids(self, vocab_size: int, salt: int) -> list[int]:
        """Token ids. Another ``salt`` gives other ones of the same length, with the same parts shared."""
        ids = range(FIRST_ID, vocab_size)
        return [token for part in self.parts for token in _rng(part, salt).choices(ids, k=part.num_tokens)]

    def prompt_text(self, salt: int) -> str:
        """Words, about one token each, or the given text behind a mark of the salt; without salt the text as it is."""
        if self.text is not None:
            return f"({salt:x}) {self.text}" if salt else self.text
        words = (" ".join(_rng(part, salt).choices(WORDS, k=part.num_tokens)) for part in self.parts)
        return " ".join(words)


def _rng(part: Part, salt: int) -> random.Random:
    return random.Random(part.seed + (salt << _SALT_SHIFT))


def clipped(
    requests: Sequence[BenchRequest], max_prompt_tokens: int | None, max_output_tokens: int | None
) -> list[BenchRequest]:
    """The same requests, none longer than that: traces of large models must fit small ones. Texts stay as they are."""
    return [_clip(request, max_prompt_tokens, max_output_tokens) for request in requests]


def _clip(request: BenchRequest, max_prompt_tokens: int | None, max_output_tokens: int | None) -> BenchRequest:
    if max_output_tokens is not None and request.output_tokens > max_output_tokens:
        request = replace(request, output_tokens=max_output_tokens)
    if max_prompt_tokens is not None and request.prompt_tokens > max_prompt_tokens:
        request = replace(request, parts=_first_tokens(request.parts, max_prompt_tokens))
    return request


def _first_tokens(parts: Sequence[Part], num_tokens: int) -> tuple[Part, ...]:
    """A shared part that is cut stays shared only among those that are cut at the same place."""
    kept: list[Part] = []
    for part in parts:
        if num_tokens <= 0:
            break
        kept.append(Part(part.seed, min(part.num_tokens, num_tokens)))
        num_tokens -= part.num_tokens
    return tuple(kept)
