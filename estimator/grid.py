"""Which steps to measure so that a profile can be fitted to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SMALLEST_CHUNK = 8
"""Tokens of the shortest prompt and of the shortest context."""

FACTOR = 4
"""Factor between neighbouring lengths."""

BATCH_FACTOR = 2
"""Factor between neighbouring batch sizes. It is smaller because the price of decoding varies most in small batches."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The work of one step.

    Attributes:
        chunks: (start, tokens) of each part of a prompt; at least 2 tokens.
        contexts: Tokens before the one that each decoding sequence computes.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    contexts: tuple[int, ...] = ()

    @property
    def ends(self) -> list[int]:
        """Tokens of each of its sequences once the step is done."""
        return [start + num for start, num in self.chunks] + [context + 1 for context in self.contexts]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of what a worker can run at once.

    Attributes:
        max_num_seqs: Sequences in a step.
        max_batch_tokens: Tokens computed in a step.
        max_model_len: Tokens of a sequence; at least ``SMALLEST_CHUNK``.
        block_size: Tokens of a KV block.
        num_blocks: Blocks of the pool.
    """

    max_num_seqs: int
    max_batch_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int

    def allow(self, shape: StepShape) -> bool:
        """Returns whether the step fits."""
        blocks = sum(-(-end // self.block_size) for end in shape.ends)
        tokens = sum(num for _, num in shape.chunks) + len(shape.contexts)
        fits = blocks <= self.num_blocks and tokens <= self.max_batch_tokens
        return fits and len(shape.ends) <= self.max_num_seqs and max(shape.ends) <= self.max_model_len


def step_grid(limits: StepLimits) -> list[StepShape]:
    """Lists some 60 steps to measure: prompts by length, context and number; decodes by batch and context; both."""
    return [shape for shape in dict.fromkeys(_shapes(limits)) if limits.allow(shape)]


def _shapes(limits: StepLimits) -> Iterator[StepShape]:
    lens = _scale(SMALLEST_CHUNK, limits.max_model_len - 1, FACTOR)
    batches = _scale(1, limits.max_num_seqs, BATCH_FACTOR)
    chunk_lens = _scale(SMALLEST_CHUNK, min(limits.max_model_len, limits.max_batch_tokens), FACTOR)
    for num_tokens in chunk_lens:
        room = limits.max_model_len - num_tokens
        for start in (0, room // 2, room):
            yield StepShape(chunks=((start, num_tokens),))
        yield StepShape(chunks=((0, num_tokens),) * 4)
    for num_seqs in batches:
        for context in lens:
            yield StepShape(contexts=(context,) * num_seqs)
    middle = lens[len(lens) // 2]
    for num_tokens in chunk_lens:
        for num_seqs in batches[1::2]:
            yield StepShape(((0, num_tokens),), (middle,) * num_seqs)


def _scale(low: int, high: int, factor: int) -> list[int]:
    """Lists ``low`` times the powers of ``factor`` below ``high``, then ``high``."""
    found = []
    while low < high:
        found.append(low)
        low *= factor
    return [*found, high]
