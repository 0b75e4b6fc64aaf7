"""The rows of a step whose logits are sampled, and those whose hidden states become vectors.

Guessed tokens have rows of their own, which say how many of them stand.

A guess is right if the sampler draws just that token in its place, from the same logits and with the same random number
as without guesses. So the output does not depend on what was guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor

from farsight.core.errors import IntegrityError
from farsight.core.request import SamplingParams
from farsight.engine.sampling.logit_adjustments import TokenHistory
from farsight.engine.sampling.sampler import NO_TOKEN
from farsight.engine.sequence import Sequence, TokenCounts
from farsight.engine.step_results import PooledRows
from farsight.kvcache import StepBatch, StepItem


class DraftedHistory(NamedTuple):
    """The tokens before a guess: those of a history, and the guesses before it."""

    known: TokenHistory
    drafts: tuple[int, ...]

    @property
    def token_ids(self) -> list[int]:
        return [*self.known.token_ids, *self.drafts]

    @property
    def prompt_len(self) -> int:
        return self.known.prompt_len

    def token_counts(self) -> TokenCounts:
        return self.known.token_counts().plus(self.drafts)


class SampledRows(NamedTuple):
    """What the sampler needs of each row whose logits a step brings, item by item (``Sampler.sample``)."""

    params: list[SamplingParams]
    positions: list[int]
    histories: list[TokenHistory]


def sampled_rows(items: SequenceOf[StepItem], sequences: Mapping[str, Sequence]) -> SampledRows:
    """Returns the rows of items that sample: one for the last known token, and one for each guess behind it."""
    rows = SampledRows([], [], [])
    for item in items:
        sequence = sequences[item.request_id]
        known = item.start + item.num_known
        rows.params.append(sequence.sampling)
        rows.positions.append(known)
        rows.histories.append(sequence)
        for count in range(1, len(item.drafts) + 1):
            rows.params.append(sequence.sampling)
            rows.positions.append(known + count)
            rows.histories.append(DraftedHistory(sequence, item.drafts[:count]))
    return rows


def tokens_that_stand(drawn: SequenceOf[int], drafts: SequenceOf[int]) -> list[int]:
    """Returns the new tokens of an item: the first draw, and each that follows a guess equal to the draw in its place.

    A row without a token ends them; the next step finds it again, and says why.

    Args:
        drawn: The first is a token; one more than ``drafts``.
    """
    tokens = [drawn[0]]
    for draft, token in zip(drafts, drawn[1:], strict=True):
        if tokens[-1] != draft or token == NO_TOKEN:
            break
        tokens.append(token)
    return tokens


class RowsToPool(NamedTuple):
    """Consecutive rows of a step that belong to one vector.

    Attributes:
        item: Index in the batch.
        row: The first row in the step.
        num_rows: Number of rows.
    """

    item: int
    row: int
    num_rows: int


def find_rows_to_pool(batch: StepBatch, order: list[int], sequences: Mapping[str, Sequence]) -> list[RowsToPool]:
    """Returns the rows of a step, its items in ``order``, of vectors that are not known yet.

    Raises:
        IntegrityError: Positions of a mean were never computed here.
    """
    found = []
    row = 0
    for i in order:
        item = batch.items[i]
        sequence = sequences[item.request_id]
        if sequence.sampling.pooling == "mean":
            known = 0 if sequence.pooled is None else sequence.pooled.num_rows
            if item.start > known:
                raise IntegrityError(f"{item.request_id}: hidden states up to token {known}, not {item.start}")
            count = item.start + item.num_tokens - known
            if count > 0:
                found.append(RowsToPool(i, row + known - item.start, count))
        elif sequence.sampling.pooling and item.samples:
            found.append(RowsToPool(i, row + item.num_tokens - 1, 1))
        row += item.num_tokens
    return found


def ends_prompt(item: StepItem, sequence: Sequence) -> bool:
    """Returns whether the item computes the last token of a prompt that is answered with tokens."""
    return item.start + item.num_tokens == sequence.prompt_len and not sequence.sampling.pooling


@torch.inference_mode()
def prompt_states(
    middle: Tensor, sampled: list[int], batch: StepBatch, sequences: Mapping[str, Sequence]
) -> dict[int, bytes]:
    """Returns the states of items that end their prompts, by index of the item: float16, with a mean square of 1.

    Args:
        middle: float32 ``[R, hidden]``, a row for each token that is sampled.
        sampled: Indices of the items that sample, in the order of their rows.
    """
    states = {}
    row = 0
    for i in sampled:
        item = batch.items[i]
        if ends_prompt(item, sequences[item.request_id]):
            state = middle[row]
            # A few numbers of a state are far beyond float16 in some models; none is beyond the root of the width here.
            state = state * torch.rsqrt(state.square().mean() + 1e-6)
            states[i] = state.to(torch.float16).cpu().numpy().tobytes()
        row += 1 + len(item.drafts)
    return states


@torch.inference_mode()
def score_rows(
    logits: Tensor,
    places: Mapping[int, int],
    found: list[RowsToPool],
    batch: StepBatch,
    sequences: Mapping[str, Sequence],
) -> dict[int, PooledRows]:
    """Returns the scores of items that ask for one, by index of the item: of two tokens the difference of the logits.

    Args:
        logits, places: As ``pool_rows`` takes hidden states.
    """
    scores = {}
    for part in found:
        sampling = sequences[batch.items[part.item].request_id].sampling
        if sampling.pooling == "score":
            of_tokens = logits[places[part.row]][list(sampling.allowed_token_ids)]
            scores[part.item] = PooledRows(1, (of_tokens[:1] - of_tokens[1:].sum()).cpu().numpy())
    return scores


@torch.inference_mode()
def pool_rows(hidden: Tensor, places: Mapping[int, int], found: list[RowsToPool]) -> dict[int, PooledRows]:
    """Sums hidden states, by index of the item.

    Args:
        hidden: float32 ``[R, hidden]``.
        places: The row of ``hidden`` of each row of the step.
    """
    pooled = {}
    for part in found:
        first = places[part.row]
        total = hidden[first : first + part.num_rows].sum(0)
        pooled[part.item] = PooledRows(part.num_rows, total.cpu().numpy())
    return pooled
