"""One request of a workload: the lengths of prompt and output, and the source of the prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

FIRST_ID = 3
"""Drawn token ids start here; lower ids are special tokens."""

WORDS = ("the", "of", "and", "to", "in", "is", "for", "that", "with", "as", "on", "are", "be", "this", "by", "it")
"""Words of drawn texts, each about one token in common tokenizers."""

_SALT_SHIFT = 32


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A section of a prompt. Parts with the same seed and length hold the same tokens, which requests then share."""

    seed: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request.

    Attributes:
        id: Index in the workload, from 0.
        output_tokens: Wanted length of the answer.
        parts: The parts of a drawn prompt.
        text: The prompt, if it is given.
        before: Roles and texts of the messages of a chat that come before its prompt.
        kind: Group in the results: ``short``, ``long``, the name of an application; empty if all are alike.
        arrival_s: Seconds between the first request of a trace and this one.
    """

    id: int
    output_tokens: int
    parts: tuple[PromptPart, ...] = ()
    text: str | None = None
    before: tuple[tuple[str, str], ...] = ()
    kind: str = ""
    arrival_s: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of a drawn prompt in tokens; 0 for a given text."""
        return sum(part.num_tokens for part in self.parts)

    def prompt_ids(self, vocab_size: int, salt: int) -> list[int]:
        """The prompt's token ids. Another ``salt`` gives other ids of the same length with the same sharing."""
        ids = range(FIRST_ID, vocab_size)
        return [token for part in self.parts for token in _rng(part, salt).choices(ids, k=part.num_tokens)]

    def prompt_text(self, salt: int) -> str:
        """The prompt as words of about one token each, or the given text after the salt (if any) in parentheses."""
        if self.text is not None:
            return f"({salt:x}) {self.text}" if salt else self.text
        words = (" ".join(_rng(part, salt).choices(WORDS, k=part.num_tokens)) for part in self.parts)
        return " ".join(words)


def _rng(part: PromptPart, salt: int) -> random.Random:
    return random.Random(part.seed + (salt << _SALT_SHIFT))


def clipped(
    requests: Sequence[BenchRequest], max_prompt_tokens: int | None, max_output_tokens: int | None
) -> list[BenchRequest]:
    """The requests cut to these lengths, so that traces of large models fit small ones; texts are not cut."""
    return [_clip(request, max_prompt_tokens, max_output_tokens) for request in requests]


def _clip(request: BenchRequest, max_prompt_tokens: int | None, max_output_tokens: int | None) -> BenchRequest:
    if max_output_tokens is not None and request.output_tokens > max_output_tokens:
        request = replace(request, output_tokens=max_output_tokens)
    if max_prompt_tokens is not None and request.prompt_tokens > max_prompt_tokens:
        request = replace(request, parts=_first_tokens(request.parts, max_prompt_tokens))
    return request


def _first_tokens(parts: Sequence[PromptPart], num_tokens: int) -> tuple[PromptPart, ...]:
    """Cuts parts to a length; a cut part stays shared among requests that are cut at the same place."""
    kept: list[PromptPart] = []
    for part in parts:
        if num_tokens <= 0:
            break
        kept.append(PromptPart(part.seed, min(part.num_tokens, num_tokens)))
        num_tokens -= part.num_tokens
    return tuple(kept)
