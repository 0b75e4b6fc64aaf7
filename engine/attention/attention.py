"""The description of a step for attention, the interface of its backends, and the scores that all of them compute.

The tokens of a step lie flattened in rows: first the decode rows, one token a sequence, then the prefill chunks
one after the other. The two parts are separate because paged kernels take them in separate calls. Everything a
kernel needs beside the activations is made once a step (``begin_step``), not once a layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class DecodePart:
    """Rows of one token each, longest sequence first.

    Attributes:
        block_tables: int64 ``[rows, max_blocks]``; unused entries repeat the row's own first block.
        kv_lens: Tokens each row attends over, its own included.
    """

    block_tables: Tensor
    kv_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Chunks of consecutive tokens of one sequence each; a chunk may start behind tokens computed earlier.

    Attributes:
        block_tables: int64 ``[chunks, max_blocks]``; unused entries repeat the chunk's own first block.
        chunk_lens: Tokens of each chunk.
        kv_lens: Tokens of the sequence up to the end of the chunk; the chunk is the last of them.
    """

    block_tables: Tensor
    chunk_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StaticDecode:
    """Rows of one token each at fixed addresses: a captured step reads them, each time with other values.

    Attributes:
        block_tables: int32 ``[rows, width]``; unused entries are any block.
        kv_lens: int32 ``[rows]``: tokens each row attends over, its own included; at least 1, or 0 for a row that is
            not there where there are ``chunks``.
        chunks: int32 ``[blocks, 4]``, as of ``PagedLaunch``: blocks of consecutive tokens of chunks, of no tokens where
            there is none; None where a step only decodes. A row's table is that of its number.
    """

    block_tables: Tensor
    kv_lens: Tensor
    chunks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GivenTensors:
    """Rows of a step whose embeddings are not those of their tokens: images.

    Attributes:
        rows: int64 ``[n]``, ascending.
        values: float32 ``[n, hidden]``.
        positions: int64 ``[3, n]``: time, row and column; None where positions have no axes.
    """

    rows: Tensor
    values: Tensor
    positions: Tensor | None


@dataclass(frozen=True, slots=True)
class StepLayout:
    """One step, flattened; ``T`` rows.

    Attributes:
        token_ids: int64 ``[T]``.
        positions: int64 ``[T]``, of the token in its sequence, for what turns queries and keys.
        slot_ids: int64 ``[T]``, where in the pool the row's key and value go.
        opened_blocks: int64 ``[n]``: blocks written for the first time in this step and not filled by it.
        sample_rows: int64 ``[R]``: rows whose logits are wanted.
        given: Rows with embeddings of their own; None without.
        state_rows: By item, the row of its state (``engine.kv_pool.StatePool``); None without states.
        state_keeps: ``StatePool.keeps_of`` the items.
    """

    token_ids: Tensor
    positions: Tensor
    slot_ids: Tensor
    opened_blocks: Tensor
    sample_rows: Tensor
    decode: DecodePart | None
    prefill: PrefillPart | None
    given: GivenTensors | None = None
    state_rows: list[int] | None = None
    state_keeps: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def num_decode(self) -> int:
        return 0 if self.decode is None else len(self.decode.kv_lens)


class StepAttention(Protocol):
    """Attention of one step, ready to be applied layer after layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Returns causal attention of the step's rows over their sequences.

        Args:
            query: ``[T, heads, head_dim]``.
            key: ``[T, kv_heads, head_dim]``: the step's own keys, which are in the pool already.
            value: The same.
            sinks: ``[heads]``, scores that take part in the softmax and have no value; None without.

        Returns:
            ``[T, heads * head_dim]``.
        """
        ...


class AttentionBackend(Protocol):
    """A way to compute paged attention.

    Attributes:
        reads_whole_blocks: It multiplies slots of a block beyond its sequence's end with 0, so no NaN may be there.
    """

    reads_whole_blocks: bool

    def begin_step(self, layout: StepLayout, pool: KVPool) -> StepAttention:
        """Makes masks and tables for a step; called before the first layer."""
        ...

    def begin_static(self, decode: StaticDecode, pool: KVPool) -> StepAttention:
        """Returns attention for repeated steps that only decode; no operation depends on the values in ``decode``."""
        ...


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
        """Returns the scores of a model."""
        blocks = config.blocks
        slopes = alibi_slopes(config.num_attention_heads) if blocks.alibi else ()
        return cls(blocks.attention_scale, blocks.attention_cap, slopes)


PLAIN_SCORES = ScoreShape()


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Returns slopes of ALiBi: a geometric series for a power of two, else also every second of the next one.

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
    """Returns attention of ``[B, heads, T, head_dim]`` over ``[B, kv_heads, keys, head_dim]``; keys in order.

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
