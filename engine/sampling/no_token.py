"""Explains to a client why its sequence has no next token. Runs only in that case."""

from __future__ import annotations

import torch
from torch import Tensor

from core.request import Fault, SamplingParams
from engine.sampling.logged_tokens import NoToken
from engine.sampling.logit_adjustments import TokenHistory


def why_no_token(logits: Tensor, scores: Tensor, param: SamplingParams, history: TokenHistory) -> NoToken:
    """Whether the model or the request itself left no token to choose.

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
    """Why a row has no likeliest token; empty if it has one."""
    top = scores.amax()
    if torch.isfinite(top):
        return ""
    if torch.isnan(top):
        return "hold NaN"
    return "hold +inf" if top > 0 else _ALL_FORBIDDEN
