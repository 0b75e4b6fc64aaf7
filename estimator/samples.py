"""What a step did, as the step-time profile sees it."""

from __future__ import annotations

from core.costs import attention_pairs
from core.messages import StepSample
from kvcache.lease import StepBatch


def step_sample(batch: StepBatch, duration_s: float) -> StepSample:
    """The sample of a step that took so many seconds. O(sequences of the step)."""
    prefill_tokens = decode_seqs = context_tokens = prefill_pairs = 0
    for item in batch.items:
        if item.num_tokens == 1:
            decode_seqs += 1
            context_tokens += item.start + 1
        else:
            prefill_tokens += item.num_tokens
            prefill_pairs += attention_pairs(item.num_tokens, item.start)
    return StepSample(prefill_tokens, decode_seqs, context_tokens, duration_s, prefill_pairs)
