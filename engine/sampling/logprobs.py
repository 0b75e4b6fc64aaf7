"""Log probabilities of tokens under the model's own distribution: of the logits as they come, not as they are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor

from core.errors import IntegrityError
from core.messages.tokens import TokenLogprobs
from engine.sequence import Sequence
from kvcache import StepBatch

_CHUNK_ROWS = 64
"""Rows that are normalised at once: a prompt of a large vocabulary would need several times its logits' memory."""

_LOWEST = -9999.0
"""Replaces a log probability that is NaN, which the wire refuses."""


def token_logprobs(logits: Tensor, tokens: SequenceOf[int], num_top: SequenceOf[int]) -> list[TokenLogprobs]:
    """Log probabilities of one token for each row and of the ``num_top`` likeliest of the row.

    Args:
        logits: float32 ``[rows, vocab]``.
    """
    found: list[TokenLogprobs] = []
    for start in range(0, len(tokens), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        found += _chunk_logprobs(logits[rows], tokens[rows], num_top[rows])
    return found


def _chunk_logprobs(logits: Tensor, tokens: SequenceOf[int], num_top: SequenceOf[int]) -> list[TokenLogprobs]:
    logprobs = logits.log_softmax(-1)
    logprobs = logprobs.nan_to_num_(nan=_LOWEST, neginf=_LOWEST, posinf=0.0)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    widest = min(max(num_top), logits.shape[-1])
    if not widest:
        return [((token,), (logprob,)) for token, logprob in zip(tokens, own, strict=True)]
    best = logprobs.topk(widest)
    found = []
    for token, logprob, count, ids, values in zip(
        tokens, own, num_top, best.indices.tolist(), best.values.tolist(), strict=True
    ):
        found.append(((token, *ids[:count]), (logprob, *values[:count])))
    return found


class PromptRows(NamedTuple):
    """Rows of a step whose logits say how likely the next tokens of a prompt were.

    Attributes:
        item: Index in the batch.
        position: Position of the first row's token in its sequence; the row is about the token after it.
        row: The first row in the step.
        num_rows: Number of rows.
    """

    item: int
    position: int
    row: int
    num_rows: int


def find_prompt_rows(batch: StepBatch, order: list[int], sequences: Mapping[str, Sequence]) -> list[PromptRows]:
    """The rows of a step, its items in ``order``, that bring log probabilities of prompts not known yet.

    Raises:
        IntegrityError: tokens before them were never computed here.
    """
    wanted = {i for i in order if sequences[batch.items[i].request_id].prompt_logprobs is not None}
    if not wanted:
        return []
    found = []
    row = 0
    for i in order:
        item = batch.items[i]
        if i in wanted:
            sequence = sequences[item.request_id]
            known = len(sequence.prompt_logprobs or ())
            if item.start > known:
                raise IntegrityError(f"{item.request_id}: log probabilities up to token {known}, not {item.start}")
            count = min(item.start + item.num_tokens, sequence.prompt_len - 1) - known
            if count > 0:
                found.append(PromptRows(i, known, row + known - item.start, count))
        row += item.num_tokens
    return found


def prompt_logprobs(logits: Tensor, rows: PromptRows, sequence: Sequence) -> list[TokenLogprobs]:
    """Log probabilities of the tokens that the rows are about; ``logits`` of the rows, float32 ``[num_rows,
    vocab]``.
    """
    tokens = sequence.token_ids[rows.position + 1 : rows.position + 1 + rows.num_rows]
    return token_logprobs(logits, tokens, [sequence.sampling.logprobs or 0] * rows.num_rows)
