"""What a step did, as the step-time profile sees it."""

from __future__ import annotations

from typing import NamedTuple

from core.costs import attention_pairs
from core.messages import StepSample
from kvcache.lease import StepBatch


class StepWork(NamedTuple):
    """What a step computes, in the order in which ``StepCost.step_s`` takes it."""

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    prefill_pairs: int


def step_work(batch: StepBatch) -> StepWork:
    """What this step computes. O(sequences of the step)."""
    prefill_tokens = decode_seqs = context_tokens = prefill_pairs = 0
    for item in batch.items:
        if item.num_tokens == 1:
            decode_seqs += 1
            context_tokens += item.start + 1
        else:
            prefill_tokens += item.num_tokens
            prefill_pairs += attention_pairs(item.num_tokens, item.start)
    return StepWork(prefill_tokens, decode_seqs, context_tokens, prefill_pairs)


def step_sample(batch: StepBatch, duration_s: float) -> StepSample:
    """The sample of a step that took so many seconds."""
    work = step_work(batch)
    return StepSample(work.prefill_tokens, work.decode_seqs, work.context_tokens, duration_s, work.prefill_pairs)
