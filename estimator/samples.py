"""The work of a step, as the step-time profile sees it."""

from __future__ import annotations

from typing import NamedTuple

from core.costs import attention_pairs
from core.messages.step_times import StepSample
from kvcache import StepBatch


class StepWork(NamedTuple):
    """The work of a step, in the order of the arguments of ``StepCost.step_s``."""

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    prefill_pairs: int


def step_work(batch: StepBatch) -> StepWork:
    """The work of this step, padding included. O(sequences of the step)."""
    prefill_tokens = decode_seqs = prefill_pairs = 0
    context_tokens = batch.padding.context_tokens
    for start, num_tokens in batch.spans():
        if num_tokens == 1:
            decode_seqs += 1
            context_tokens += start + 1
        else:
            prefill_tokens += num_tokens
            prefill_pairs += attention_pairs(num_tokens, start)
    return StepWork(prefill_tokens, decode_seqs, context_tokens, prefill_pairs)


def step_sample(batch: StepBatch, duration_s: float) -> StepSample:
    """The sample of a step that took so many seconds."""
    work = step_work(batch)
    return StepSample(work.prefill_tokens, work.decode_seqs, work.context_tokens, duration_s, work.prefill_pairs)
