"""What a step did, as the step-time profile sees it."""

from __future__ import annotations

from core.costs import attention_pairs
from core.messages import StepSample
from kvcache import StepBatch


def step_sample(batch: StepBatch, duration_s: float) -> StepSample:
    """The sample of a step that took so many seconds, padding included. O(sequences of the step)."""
    prefill_tokens = decode_seqs = prefill_pairs = 0
    context_tokens = batch.padding.context_tokens
    for start, num_tokens in batch.spans():
        if num_tokens == 1:
            decode_seqs += 1
            context_tokens += start + 1
        else:
            prefill_tokens += num_tokens
            prefill_pairs += attention_pairs(num_tokens, start)
    return StepSample(prefill_tokens, decode_seqs, context_tokens, duration_s, prefill_pairs)
