"""Adjusts logits before temperature: penalties, biases, ends that must not come yet.

The result is a function of the logits and the tokens so far alone. The work grows with the tokens of a row, not with
the vocabulary, and one call adjusts all rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from core.request import SamplingParams


class TokenHistory(Protocol):
    """The tokens of one row: prompt and output so far."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def prompt_len(self) -> int: ...


def adjust_logits(
    logits: Tensor, params: Sequence[SamplingParams], histories: Sequence[TokenHistory], eos_token_ids: tuple[int, ...]
) -> Tensor:
    """Penalties, then biases, then what is forbidden: by ``allowed_token_ids``, ``bad_words`` and ``min_tokens``.

    The order is that of transformers and vLLM.

    Args:
        logits: float32 ``[rows, vocab]``; not changed.
        params: One for each row.
        histories: One for each row.

    Returns:
        float32 ``[rows, vocab]``; -inf for tokens that must not be drawn.
    """
    scores = logits.clone()
    penalized = [row for row, param in enumerate(params) if param.penalizes]
    if penalized:
        _penalize_repetition(scores, [(row, params[row], histories[row]) for row in penalized])
        _penalize_output(scores, [(row, params[row], histories[row]) for row in penalized])
    biased = [row for row, param in enumerate(params) if param.logit_bias]
    if biased:
        ids = [[token_id for token_id, _ in params[row].logit_bias] for row in biased]
        biases = [bias for row in biased for _, bias in params[row].logit_bias]
        places = _places(scores, biased, ids)
        scores.view(-1).index_add_(0, places, torch.tensor(biases, dtype=scores.dtype, device=scores.device))
    _keep_allowed(scores, params)
    _forbid_words(scores, params, histories)
    _forbid_ends(scores, params, histories, eos_token_ids)
    return scores


_Row = tuple[int, SamplingParams, TokenHistory]


def _penalize_repetition(scores: Tensor, rows: list[_Row]) -> None:
    """As transformers' ``RepetitionPenaltyLogitsProcessor``, over prompt and output."""
    rows = [each for each in rows if each[1].repetition_penalty != 1]
    if not rows:
        return
    ids = [history.token_ids for _, _, history in rows]
    places = _places(scores, [row for row, _, _ in rows], ids)
    factors = _repeated(scores, [param.repetition_penalty for _, param, _ in rows], ids)
    flat = scores.view(-1)
    found = flat[places]
    flat[places] = torch.where(found < 0, found * factors, found / factors)  # a token twice: the same value twice


def _penalize_output(scores: Tensor, rows: list[_Row]) -> None:
    """As OpenAI defines presence and frequency penalties, over the output."""
    rows = [each for each in rows if each[1].presence_penalty or each[1].frequency_penalty]
    ids = [history.token_ids[history.prompt_len :] for _, _, history in rows]
    if not any(ids):
        return
    places = _places(scores, [row for row, _, _ in rows], ids)
    flat = scores.view(-1)
    flat[places] = flat[places] - _repeated(scores, [param.presence_penalty for _, param, _ in rows], ids)
    flat.index_add_(0, places, _repeated(scores, [param.frequency_penalty for _, param, _ in rows], ids), alpha=-1)


def _keep_allowed(scores: Tensor, params: Sequence[SamplingParams]) -> None:
    for row, param in enumerate(params):
        if param.allowed_token_ids:
            ids = torch.tensor(param.allowed_token_ids, dtype=torch.int64, device=scores.device)
            kept = scores[row, ids]
            scores[row].fill_(float("-inf"))
            scores[row, ids] = kept


def _forbid_words(scores: Tensor, params: Sequence[SamplingParams], histories: Sequence[TokenHistory]) -> None:
    """Forbids the last token of each word whose other tokens the output ends with."""
    for row, param in enumerate(params):
        if not param.bad_words:
            continue
        output = histories[row].token_ids[histories[row].prompt_len :]
        ids = [word[-1] for word in param.bad_words if len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1]]
        if ids:
            scores[row, torch.tensor(ids, dtype=torch.int64, device=scores.device)] = float("-inf")


def _forbid_ends(
    scores: Tensor, params: Sequence[SamplingParams], histories: Sequence[TokenHistory], eos_token_ids: tuple[int, ...]
) -> None:
    rows, ids = [], []
    for row, param in enumerate(params):
        if param.min_tokens > 0 and len(histories[row].token_ids) - histories[row].prompt_len < param.min_tokens:
            rows.append(row)
            ids.append([*param.stop_token_ids, *(eos_token_ids if param.eos_ends else ())])
    if rows:
        scores.view(-1)[_places(scores, rows, ids)] = float("-inf")


def _places(scores: Tensor, rows: list[int], ids: list[list[int]]) -> Tensor:
    """Indices into the flat scores of the given tokens of each row, row by row."""
    tokens = torch.tensor(list(chain.from_iterable(ids)), dtype=torch.int64, device=scores.device)
    starts = torch.tensor([row * scores.shape[-1] for row in rows], dtype=torch.int64, device=scores.device)
    return tokens + starts.repeat_interleave(_lengths(scores, ids))


def _repeated(scores: Tensor, values: list[float], ids: list[list[int]]) -> Tensor:
    """Each row's value once for each of its tokens."""
    return torch.tensor(values, dtype=scores.dtype, device=scores.device).repeat_interleave(_lengths(scores, ids))


def _lengths(scores: Tensor, ids: list[list[int]]) -> Tensor:
    return torch.tensor([len(each) for each in ids], device=scores.device)
