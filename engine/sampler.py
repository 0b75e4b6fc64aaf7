"""From logits to the next tokens.

A draw is a function of (seed, position) and the logits alone: no generator state, so a sequence that is preempted,
moved to another worker or batched with others draws the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.request import SamplingParams

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def counter_uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) that belongs to ``position`` under ``seed``; 53 bits.

    SplitMix64 (Steele, Lea, Flood 2014) with the counter in place of its state. The seed is mixed first, because
    seeds that differ by a multiple of the increment would otherwise share one stream, shifted.
    """
    bits = _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)
    return (bits >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class Sampler:
    """Chooses one token a row."""

    def sample(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        best: list[int] | None = None,
    ) -> list[int]:
        """The next token of each row.

        Args:
            logits: float32 ``[rows, vocab]``.
            params: One a row.
            positions: Index of each new token in its sequence, prompt included.
            best: The likeliest token of each row, if it is known already.
        """
        drawn = [row for row, param in enumerate(params) if not param.greedy]
        if len(drawn) == len(params):
            return self._draw(logits, params, positions)
        tokens: list[int] = logits.argmax(-1).tolist() if best is None else list(best)
        if drawn:
            rows = logits[torch.tensor(drawn, device=logits.device)]
            draws = self._draw(rows, [params[row] for row in drawn], [positions[row] for row in drawn])
            for row, token in zip(drawn, draws, strict=True):
                tokens[row] = token
        return tokens

    def _draw(self, logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
        """Inverse of the cumulative distribution, over the vocabulary in order of token id."""
        scores = warp_logits(logits, params)
        cumulative = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
        uniforms = [counter_uniform(param.seed, position) for param, position in zip(params, positions, strict=True)]
        targets = torch.tensor(uniforms, dtype=torch.float64, device=logits.device) * cumulative[:, -1]
        # right=True: the first token whose cumulative mass exceeds the target, so one of mass 0 is never drawn
        tokens: list[int] = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0].tolist()
        return tokens


def warp_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Temperature, then top-k, then top-p, as transformers' logits warpers; dropped tokens are -inf.

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
        _keep_top_k(scores, limited)
    nucleus = [(row, param.top_p) for row, param in enumerate(params) if param.top_p < 1]
    if nucleus:
        _keep_top_p(scores, nucleus)
    return scores


def _keep_top_k(scores: Tensor, limited: list[tuple[int, int]]) -> None:
    """Drops what scores less than the k-th best; ties with the k-th stay."""
    rows = torch.tensor([row for row, _ in limited], device=scores.device)
    ranks = torch.tensor([top_k - 1 for _, top_k in limited], device=scores.device)
    chosen = scores[rows]
    best = chosen.topk(max(top_k for _, top_k in limited)).values
    threshold = best.gather(1, ranks[:, None])
    scores[rows] = chosen.masked_fill_(chosen < threshold, float("-inf"))


def _keep_top_p(scores: Tensor, nucleus: list[tuple[int, float]]) -> None:
    """Drops the least likely tokens as long as their mass together is at most 1 - p; the likeliest stays."""
    rows = torch.tensor([row for row, _ in nucleus], device=scores.device)
    tail_mass = torch.tensor([1 - top_p for _, top_p in nucleus], device=scores.device)
    chosen = scores[rows]
    ascending, order = chosen.sort()
    dropped = ascending.softmax(-1).cumsum(-1) <= tail_mass[:, None]
    dropped[:, -1] = False
    scores[rows] = chosen.masked_fill_(dropped.scatter(1, order, dropped), float("-inf"))
