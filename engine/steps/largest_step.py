"""The step that takes the most memory: run once, on a device whose memory is about to be divided."""

from __future__ import annotations

from core.config.engine import EngineConfig
from core.request import Request, SamplingParams
from engine.sequence import Sequence
from kvcache import StepBatch, StepItem

_NAME = "\0largest"
_SAMPLING = SamplingParams(1, temperature=1.0, top_k=2, top_p=0.9, seed=0)
"""Sampling parameters with the most memory that a draw can take."""


def largest_step(engine: EngineConfig) -> tuple[StepBatch, dict[str, Sequence], int]:
    """The largest step: as many tokens as a step may compute, in as many prompts as it may hold; each samples.

    Returns:
        The step, its sequences, and how many blocks it is computed in: 0 and up.
    """
    num_seqs = min(engine.max_num_seqs, engine.max_batch_tokens)
    each, more = divmod(engine.max_batch_tokens, num_seqs)
    items, sequences, num_blocks = [], {}, 0
    for i in range(num_seqs):
        name, num_tokens = f"{_NAME}{i}", each + (i < more)
        used = -(-num_tokens // engine.kv_block_size)
        items.append(StepItem(name, 0, num_tokens, True, list(range(num_blocks, num_blocks + used))))
        sequences[name] = Sequence.of(Request(name, 0, "", (0,) * num_tokens, _SAMPLING))
        num_blocks += used
    return StepBatch(tuple(items)), sequences, num_blocks
