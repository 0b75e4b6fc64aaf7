"""Adjusts logits before temperature: penalties, biases, ends that must not come yet. Explains where no token is left.

The result is a function of the logits and the tokens so far alone. The work grows with the tokens of a row, not with
the vocabulary, and one call adjusts all rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from farsight.core.request import Fault, SamplingParams
from farsight.engine.sequence import TokenCounts
from farsight.engine.step_results import NoToken


class TokenHistory(Protocol):
    """The tokens of one row: prompt and output so far."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def prompt_len(self) -> int: ...

    def token_counts(self) -> TokenCounts: ...


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
        counts = [histories[row].token_counts() for row in penalized]
        _penalize(scores, penalized, [params[row] for row in penalized], counts)
    biased = [row for row, param in enumerate(params) if param.logit_bias]
    if biased:
        ids = [[token_id for token_id, _ in params[row].logit_bias] for row in biased]
        biases = [bias for row in biased for _, bias in params[row].logit_bias]
        places = _places(scores, biased, ids)
        scores.view(-1).index_add_(0, places, torch.tensor(biases, dtype=scores.dtype, device=scores.device))
    _keep_allowed(scores, params)
    for row, param in enumerate(params):
        if param.bad_words or param.min_tokens:
            forbidden = forbidden_ids(param, histories[row], eos_token_ids)
            scores[row, torch.tensor(forbidden, dtype=torch.int64, device=scores.device)] = float("-inf")
    # What is forbidden hides no NaN: the model is at fault then, whatever the request forbids.
    scores.masked_fill_(~logits.amax(-1, keepdim=True).isfinite(), float("nan"))
    return scores


def _penalize(scores: Tensor, rows: list[int], params: list[SamplingParams], counts: list[TokenCounts]) -> None:
    """Penalises: repetition as transformers' ``RepetitionPenaltyLogitsProcessor``, over all; presence and frequency
    as OpenAI defines them, over the output.
    """
    ids = [each.ids.tolist() for each in counts]
    places = _places(scores, rows, ids)
    times = torch.from_numpy(np.concatenate([each.counts for each in counts])).to(scores)
    factors = _repeated(scores, [param.repetition_penalty for param in params], ids)
    flat = scores.view(-1)
    found = flat[places]
    found = torch.where(found < 0, found * factors, found / factors)
    found -= _repeated(scores, [param.presence_penalty for param in params], ids) * (times > 0)
    flat[places] = found - _repeated(scores, [param.frequency_penalty for param in params], ids) * times


def _keep_allowed(scores: Tensor, params: Sequence[SamplingParams]) -> None:
    for row, param in enumerate(params):
        if param.allowed_token_ids:
            ids = torch.tensor(param.allowed_token_ids, dtype=torch.int64, device=scores.device)
            kept = scores[row, ids]
            scores[row].fill_(float("-inf"))
            scores[row, ids] = kept


def forbidden_ids(param: SamplingParams, history: TokenHistory, eos_token_ids: tuple[int, ...]) -> list[int]:
    """Returns the last token of each bad word whose other tokens the output ends with, and ends that come too early."""
    ids: list[int] = []
    if param.bad_words:
        output = history.token_ids[history.prompt_len :]
        ids = [word[-1] for word in param.bad_words if len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1]]
    if len(history.token_ids) - history.prompt_len < param.min_tokens:
        ids += [*param.stop_token_ids, *(eos_token_ids if param.eos_ends else ())]
    return ids


def _places(scores: Tensor, rows: list[int], ids: list[list[int]]) -> Tensor:
    """Returns indices into the flat scores of the given tokens of each row, row by row."""
    tokens = torch.tensor(list(chain.from_iterable(ids)), dtype=torch.int64, device=scores.device)
    starts = torch.tensor([row * scores.shape[-1] for row in rows], dtype=torch.int64, device=scores.device)
    return tokens + starts.repeat_interleave(_lengths(scores, ids))


def _repeated(scores: Tensor, values: list[float], ids: list[list[int]]) -> Tensor:
    """Returns each row's value once for each of its tokens."""
    return torch.tensor(values, dtype=scores.dtype, device=scores.device).repeat_interleave(_lengths(scores, ids))


def _lengths(scores: Tensor, ids: list[list[int]]) -> Tensor:
    return torch.tensor([len(each) for each in ids], device=scores.device)


def why_no_token(logits: Tensor, scores: Tensor, param: SamplingParams, history: TokenHistory) -> NoToken:
    """Tells whether the model or the request itself left no token to choose.

    Args:
        logits: Logits as the model computed them, float32 ``[vocab]``.
        scores: Logits as the request's parameters change them.
    """
    index = len(history.token_ids) - history.prompt_len
    problem = _problem(logits)
    if problem:
        return NoToken(f"output token {index} cannot be chosen: the model's logits {problem}", Fault.MODEL)
    if _problem(scores) == _ALL_FORBIDDEN and (param.allowed_token_ids or param.bad_words):
        reason = f"output token {index} cannot be chosen: allowed_token_ids, bad_words and min_tokens leave none"
        return NoToken(reason, Fault.REQUEST)
    if _problem(scores) == _ALL_FORBIDDEN:
        ends = f"{len(set(param.stop_token_ids))} stop_token_ids" + (" and the model's EOS" if param.eos_ends else "")
        reason = (
            f"output token {index} cannot be chosen: min_tokens = {param.min_tokens} forbids every token that ends the "
            f"output, and with {ends} these are all {len(scores)} of the vocabulary; ask for min_tokens = 0 or fewer "
            "stop_token_ids"
        )
        return NoToken(reason, Fault.REQUEST)
    reason = (
        f"output token {index} cannot be chosen: penalties or logit_bias take logits beyond the largest float32; ask "
        f"for smaller ones (repetition_penalty = {param.repetition_penalty:g})"
    )
    return NoToken(reason, Fault.REQUEST)


_ALL_FORBIDDEN = "are all -inf"


def _problem(scores: Tensor) -> str:
    """Returns why a row has no likeliest token; empty if it has one."""
    top = scores.amax()
    if torch.isfinite(top):
        return ""
    if torch.isnan(top):
        return "hold NaN"
    return "hold +inf" if top > 0 else _ALL_FORBIDDEN
