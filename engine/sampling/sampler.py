"""From logits to the next tokens and, where asked for, to their log probabilities before any adjustment: by torch.

The compiled step brings a sampler of its own (``engine.native.sampler``), of the same law (ADR 94).

A draw is a function of (seed, position), the logits and the tokens so far alone: no generator state, so a sequence that
is preempted, moved to another worker or batched with others draws the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor

from farsight.core.errors import IntegrityError
from farsight.core.messages.tokens import TokenLogprobs
from farsight.core.request import SamplingParams
from farsight.engine.sampling.logit_adjustments import TokenHistory, adjust_logits, why_no_token
from farsight.engine.sampling.token_masks import MaskedRows
from farsight.engine.sequence import Sequence
from farsight.engine.step_results import NoToken
from farsight.kvcache import StepBatch

NO_TOKEN = -1
"""Stands for the token of a row that has none: a score is NaN or +inf, or all are -inf. Never a token id."""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def counter_uniform(seed: int, position: int) -> float:
    """Returns the uniform number in [0, 1) that belongs to ``position`` under ``seed``; 53 bits.

    SplitMix64 (Steele, Lea, Flood 2014) with the counter in place of its state. The seed is mixed first, because
    seeds that differ by a multiple of the increment would otherwise share one stream, shifted.
    """
    bits = _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)
    return (bits >> 11) * 2.0**-53


class StepLogits(NamedTuple):
    """Results of a step for the rows whose logits are wanted, in their order; valid until the next step.

    Attributes:
        logits: float32 ``[R, vocab]``.
        best: The token of each row that the step has chosen, where it has: the likeliest one, or one drawn by the row's
            parameters (``Sampler.settles``).
        hidden: Their hidden states behind the last norm, float32 ``[R, hidden]``, where they were asked for.
        middle: The same behind half of the layers.
    """

    logits: Tensor
    best: list[int] | None
    hidden: Tensor | None = None
    middle: Tensor | None = None


def likeliest(scores: Tensor) -> Tensor:
    """Returns the likeliest token of each row, int64 ``[rows]``; ``NO_TOKEN`` where there is none.

    One look at the best score tells: to ``argmax`` a NaN is larger than any number. CUDA graphs record this, so no
    ``torch.where`` with a number: that copies it to the device.
    """
    best = scores.argmax(-1, keepdim=True)
    top = scores.gather(-1, best)
    return best.masked_fill_(top - top != 0, NO_TOKEN)[:, 0]  # inf - inf is NaN, as is NaN - NaN


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class Sampler:
    """Chooses one token for each row.

    Args:
        eos_token_ids: Tokens that ``min_tokens`` holds back, beside a request's own ``stop_token_ids``.
    """

    def __init__(self, eos_token_ids: tuple[int, ...] = ()) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(
        self,
        logits: Tensor,
        params: SequenceOf[SamplingParams],
        positions: SequenceOf[int],
        histories: SequenceOf[TokenHistory] = (),
        best: list[int] | None = None,
        masks: MaskedRows | None = None,
    ) -> list[int]:
        """Returns the next token of each row; ``NO_TOKEN`` where there is none, which does not affect the other rows.

        Args:
            logits: float32 ``[rows, vocab]``.
            params: One a row.
            positions: Index of each new token in its sequence, prompt included.
            histories: One a row; read where params adjust logits, and only needed if some do.
            best: The tokens that the step has chosen, if it has; rows that ``settles`` accepts then cost nothing.
            masks: What grammars allow; of rows whose params look back.
        """
        if masks is not None:
            logits = masks.apply(logits)
        tokens = [NO_TOKEN] * len(params) if best is None else list(best)
        for draws in (False, True):
            chosen = [row for row, each in enumerate(params) if each.greedy is not draws]
            rows = chosen if best is None else [row for row in chosen if not self.settles(params[row])]
            if rows:
                scores = self._scores(logits, rows, params, histories)
                own = [params[row] for row in rows]
                found = self._draw(scores, own, [positions[row] for row in rows]) if draws else likeliest(scores)
                for row, token in zip(rows, found.tolist(), strict=True):
                    tokens[row] = token
        return tokens

    def settles(self, param: SamplingParams) -> bool:
        """Tells whether a step that chooses tokens chooses those of such rows: by ``likeliest``, of plain ones."""
        return param.plain

    def _scores(
        self,
        logits: Tensor,
        rows: list[int],
        params: SequenceOf[SamplingParams],
        histories: SequenceOf[TokenHistory],
    ) -> Tensor:
        """Returns the logits of some rows, adjusted where their parameters ask for that."""
        scores = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
        adjusted = [place for place, row in enumerate(rows) if params[row].adjusts]
        if not adjusted:
            return scores
        places, own = torch.tensor(adjusted, device=logits.device), [rows[place] for place in adjusted]
        changed = adjust_logits(
            scores[places], [params[row] for row in own], [histories[row] for row in own], self._eos_token_ids
        )
        return scores.index_copy(0, places, changed)

    def _draw(self, logits: Tensor, params: SequenceOf[SamplingParams], positions: SequenceOf[int]) -> Tensor:
        """Inverts the cumulative distribution, over the vocabulary in order of token id."""
        scores = warp_logits(logits, params)
        cumulative = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
        uniforms = [counter_uniform(param.seed, position) for param, position in zip(params, positions, strict=True)]
        totals = cumulative[:, -1]
        targets = torch.tensor(uniforms, dtype=torch.float64, device=logits.device) * totals
        # right=True: the first token whose cumulative mass exceeds the target, so one of mass 0 is never drawn
        found = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]
        return found.masked_fill_(totals.isnan(), NO_TOKEN)

    def token_logprobs(
        self, logits: Tensor, rows: SequenceOf[int], tokens: SequenceOf[int], num_top: SequenceOf[int]
    ) -> list[TokenLogprobs]:
        """Returns log probabilities of one token for each of some rows and of the ``num_top`` likeliest of the row.

        Args:
            logits: float32 ``[any, vocab]``.
        """
        found: list[TokenLogprobs] = []
        for start in range(0, len(rows), _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            chosen = logits[torch.tensor(rows[part], device=logits.device)]
            found += _chunk_logprobs(chosen, tokens[part], num_top[part])
        return found

    def prompt_logprobs(self, logits: Tensor, first: int, rows: PromptRows, sequence: Sequence) -> list[TokenLogprobs]:
        """Returns those of the tokens of a prompt that rows are about, the first of which is ``logits[first]``."""
        tokens = sequence.token_ids[rows.position + 1 : rows.position + 1 + rows.num_rows]
        places = range(first, first + rows.num_rows)
        return self.token_logprobs(logits, places, tokens, [sequence.sampling.logprobs or 0] * rows.num_rows)

    def why_no_token(
        self, logits: Tensor, row: int, param: SamplingParams, history: TokenHistory, masks: MaskedRows | None = None
    ) -> NoToken:
        """Tells why ``sample`` gives a row ``NO_TOKEN``; ``logits`` are the step's, float32 ``[rows, vocab]``."""
        logits = (logits if masks is None else masks.apply(logits))[row]
        scores = adjust_logits(logits[None], [param], [history], self._eos_token_ids)[0]
        return why_no_token(logits, scores, param, history)


def warp_logits(logits: Tensor, params: SequenceOf[SamplingParams]) -> Tensor:
    """Applies temperature, top-k, top-p, then min-p, as transformers' logits warpers; dropped tokens are -inf.

    A row that has no likeliest token becomes NaN as a whole.

    Args:
        logits: float32 ``[rows, vocab]``; not changed.
        params: One a row, none of them greedy.
    """
    temperatures = torch.tensor([param.temperature for param in params], dtype=torch.float64, device=logits.device)
    # Relative to the maximum, so that a tiny temperature gives 0 and -inf, not inf and NaN.
    relative = (logits - logits.amax(-1, keepdim=True)).double()
    scores = (relative / temperatures[:, None]).float()
    vocab_size = logits.shape[-1]
    limited = [(row, param.top_k) for row, param in enumerate(params) if 0 < param.top_k < vocab_size]
    if limited:
        _keep_top_k(scores, logits, limited)
    nucleus = [(row, param.top_p) for row, param in enumerate(params) if param.top_p < 1]
    if nucleus:
        _keep_top_p(scores, logits, nucleus)
    floored = [(row, param.min_p) for row, param in enumerate(params) if param.min_p > 0]
    if floored:
        _keep_min_p(scores, floored)
    return scores


def _keep_top_k(scores: Tensor, logits: Tensor, limited: list[tuple[int, int]]) -> None:
    """Drops tokens whose logits are below the k-th best; ties with the k-th stay."""
    rows = torch.tensor([row for row, _ in limited], device=scores.device)
    ranks = torch.tensor([top_k - 1 for _, top_k in limited], device=scores.device)
    chosen = logits[rows]
    best = chosen.topk(max(top_k for _, top_k in limited)).values
    threshold = best.gather(1, ranks[:, None])
    scores[rows] = scores[rows].masked_fill_(chosen < threshold, float("-inf"))


def _keep_top_p(scores: Tensor, logits: Tensor, nucleus: list[tuple[int, float]]) -> None:
    """Drops the least likely tokens as long as their mass together is at most 1 - p; the likeliest stays.

    Where logits are equal, tokens of lower ids go first.
    """
    rows = torch.tensor([row for row, _ in nucleus], device=scores.device)
    tail_mass = torch.tensor([1 - top_p for _, top_p in nucleus], dtype=torch.float64, device=scores.device)
    chosen = scores[rows]
    order = logits[rows].masked_fill_(chosen == float("-inf"), float("-inf")).sort(stable=True).indices
    ascending = chosen.gather(1, order)
    # In double precision: sums of float32 depend on their order, which differs between devices.
    dropped = ascending.softmax(-1, dtype=torch.float64).cumsum(-1) <= tail_mass[:, None]
    dropped[:, -1] = False
    scores[rows] = chosen.masked_fill_(dropped.scatter(1, order, dropped), float("-inf"))


def _keep_min_p(scores: Tensor, floored: list[tuple[int, float]]) -> None:
    """Drops tokens less likely than this share of the likeliest one."""
    rows = torch.tensor([row for row, _ in floored], device=scores.device)
    shares = torch.tensor([min_p for _, min_p in floored], device=scores.device)
    chosen = scores[rows]
    probabilities = chosen.softmax(-1)
    threshold = shares[:, None] * probabilities.amax(-1, keepdim=True)
    scores[rows] = chosen.masked_fill_(probabilities < threshold, float("-inf"))


_CHUNK_ROWS = 64
"""Rows that are normalised at once: a prompt of a large vocabulary would need several times its logits' memory."""

_LOWEST = -9999.0
"""Replaces a log probability that is NaN, which the wire refuses."""


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
    """Returns the rows of a step, its items in ``order``, that bring log probabilities of prompts not known yet.

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
