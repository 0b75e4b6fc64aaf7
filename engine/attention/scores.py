"""What becomes of the products of queries and keys before the softmax: scale, soft cap, ALiBi; in torch operations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.checkpoint.model_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class ScoreShape:
    """The attributes are those of ``Blocks``.

    Attributes:
        scale: Factor of the products; None: one over the root of the head's size.
        cap: Scaled products ``s`` become ``cap * tanh(s / cap)``.
        slopes: ALiBi's, by query head; empty without.
    """

    scale: float | None = None
    cap: float | None = None
    slopes: tuple[float, ...] = ()

    @classmethod
    def of_model(cls, config: DecoderConfig) -> ScoreShape:
        """The scores of a model."""
        blocks = config.blocks
        slopes = alibi_slopes(config.num_attention_heads) if blocks.alibi else ()
        return cls(blocks.attention_scale, blocks.attention_cap, slopes)


PLAIN_SCORES = ScoreShape()


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Slopes of ALiBi: a geometric series for a power of two; for other numbers of heads every second of the next one.

    Press, Smith, Lewis: Train Short, Test Long (2022), section 3 and its published program.
    """
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / whole) for i in range(heads - whole)]
    return tuple(slopes)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scores: ScoreShape,
    sinks: Tensor | None = None,
    *,
    causal: bool = False,
    grouped: bool = False,
) -> Tensor:
    """Attention of ``[B, heads, T, head_dim]`` over ``[B, kv_heads, keys, head_dim]``; key ``i`` is at position ``i``.

    Args:
        mask: Added to the scores.
        sinks: By query head: a score that takes part in the softmax and has no value.
        causal: Query ``i`` sees the keys up to ``i``; there is no mask.
        grouped: Several heads share a KV head. Otherwise the rows of ``query`` may be such heads in place of tokens.
    """
    if scores.cap is None and not scores.slopes and sinks is None:
        return scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scores.scale, enable_gqa=grouped
        )
    heads = query.shape[1]
    if grouped:
        key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scores.scale is None else scores.scale
    products = query @ key.transpose(-1, -2) * scale
    if scores.cap is not None:
        products = torch.tanh(products / scores.cap) * scores.cap
    if scores.slopes:
        slopes = torch.tensor(scores.slopes, device=query.device).view(heads, -1, 1)
        products = products + (slopes * torch.arange(key.shape[2], device=query.device)).to(products.dtype)
    if causal:
        hidden = torch.ones(products.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        products = products.masked_fill(hidden, float("-inf"))
    elif mask is not None:
        products = products + mask
    if sinks is not None:  # the rows of a head may be the heads that share its keys
        sink = sinks.to(products.dtype).view(heads, -1, 1).expand(*products.shape[:-1], 1)
        products = torch.cat([products, sink], -1)
    weights = torch.softmax(products, -1, dtype=torch.float32).to(query.dtype)
    return (weights if sinks is None else weights[..., :-1]) @ value
