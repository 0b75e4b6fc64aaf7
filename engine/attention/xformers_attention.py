"""Paged attention by xformers' kernels (``xformers.ops.fmha``, version 0.0.35).

- Decode: Triton's split-K kernel over the pages, chosen by name; left to itself xformers takes it for 32 rows at most.
- Whole prompts: flash attention over the step's own keys and values; the pool is not read.
- Chunks behind earlier tokens: every chunk attends to itself, causally, and to the pages of what came before it; the
  two parts are merged by their log-sum-exps. With FlashAttention 3 all chunks are one causal call over the pages.

Triton compiles a kernel again for each number of rows and of pages that it is called with. So the numbers are rounded
up to sizes that repeat; the added rows have no keys, which costs next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from xformers.ops import fmha
from xformers.ops.fmha import attn_bias, flash, flash3, triton_splitk
from xformers.ops.fmha.dispatch import fa3_available

from farsight.engine.attention.attention import (
    PLAIN_SCORES,
    DecodePart,
    PrefillPart,
    ScoreShape,
    StaticDecode,
    StepAttention,
    StepLayout,
)
from farsight.engine.attention.layout import StepSizes
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.kv_pool import KVPool

Operator = type[Any]
"""A kernel of ``xformers.ops.fmha``."""

PAGE_SIZE = 64
"""Tokens that the split-K kernel takes at once; a page holds a multiple."""

EXTENSION_REASON = "xFormers wasn't build with CUDA support"
"""The reason that xformers gives against each of its kernels if its own C++ extension cannot be loaded. It is built for
one version of CUDA: for 12, where torch comes with 13. The kernels used here are Triton's and torch's."""

_HEAD_DIMS = (16, 32, 64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
_CHUNK_STEP = 256
"""Longer chunks are rounded up to multiples of this, not to powers of two, since the added tokens are computed."""


@dataclass(frozen=True, slots=True)
class Operators:
    """The kernels for each kind of attention.

    Attributes:
        decode: One query a sequence, over pages.
        pages: Many queries a sequence over pages, none of them masked; gives a log-sum-exp.
        prompt: Causal attention of chunks to themselves; gives a log-sum-exp.
        chunks: Causal attention of chunks over pages, their own tokens included; None if there is no such kernel.
    """

    decode: Operator
    pages: Operator
    prompt: Operator
    chunks: Operator | None = None


class WithoutExtension:
    """Mixed into a kernel that does not need xformers' extension."""

    @classmethod
    def not_supported_reasons(cls, inputs: Any) -> list[str]:
        """Further reasons why the kernel does not take these inputs."""
        reasons: list[str] = super().not_supported_reasons(inputs)  # type: ignore[misc]
        return [reason for reason in reasons if reason != EXTENSION_REASON]


class SmallScratch:
    """Mixed into split-K: the parts of a decode row are kept for the queries that share a KV head, not for 32.

    The kernel writes under a mask, so nothing else uses the rest: 2 GiB for 256 sequences in tables of 32k tokens.
    """

    MAX_BLOCK_M = 1


class _SplitK(WithoutExtension, SmallScratch, triton_splitk.FwOp):  # type: ignore[misc]
    pass


class _SplitInOne(WithoutExtension, triton_splitk.FwOp_S1):  # type: ignore[misc]
    """Split-K without a split: there are rows enough, and the merging kernel is compiled for each number of rows."""


class _Flash(WithoutExtension, flash.FwOp):  # type: ignore[misc]
    pass


class _Flash3(WithoutExtension, flash3.FwOp):  # type: ignore[misc]
    pass


def gpu_operators() -> Operators:
    """The kernels of an NVIDIA GPU: flash attention is FlashAttention 3 where that is installed."""
    has_fa3 = fa3_available()
    return Operators(
        decode=_SplitK,
        pages=_SplitInOne,
        prompt=_Flash3 if has_fa3 else _Flash,
        chunks=_Flash3 if has_fa3 else None,
    )


def xformers_problem(config: DecoderConfig, dtype: torch.dtype, block_size: int) -> str | None:
    """Why these kernels cannot run this model; None if they can, if anything can on this device."""
    if dtype not in _DTYPES:
        return f"dtype {dtype}: float16 and bfloat16 are supported"
    if config.head_dim not in _HEAD_DIMS:
        return f"head_dim {config.head_dim}: one of {', '.join(map(str, _HEAD_DIMS))} is supported"
    if any(window is not None for window in config.sliding_windows):
        return "sliding-window attention is not supported"
    if config.blocks.sinks:
        return "attention sinks are not supported"
    if ScoreShape.of_model(config) != PLAIN_SCORES:
        return "scores with a scale of their own, a soft cap or ALiBi are not supported"
    if block_size % PAGE_SIZE:
        return f"block_size {block_size}: multiples of {PAGE_SIZE} are supported"
    return None


def operator_problem(operators: Operators, config: DecoderConfig, pool: KVPool) -> str | None:
    """xformers' own reasons against its kernels on the pool's device; None if there are none."""
    device = pool.keys[0].device
    query = torch.zeros(1, 1, config.num_attention_heads, config.head_dim, dtype=pool.dtype, device=device)
    grouped = _grouped(query[0], config.num_key_value_heads)
    keys, values = _expanded(pool.keys[0], grouped), _expanded(pool.values[0], grouped)
    tables = torch.zeros(1, 1, dtype=torch.int32, device=device)
    paged = _paged(attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask, [1], [1], tables, pool.block_size)
    own = attn_bias.BlockDiagonalCausalMask.from_seqlens([1], device=device)
    for operator, bias, shown in (
        (operators.decode, paged, (keys, values)),
        (operators.prompt, own, (keys[:, :1], values[:, :1])),
    ):
        reasons = operator.not_supported_reasons(fmha.Inputs(grouped, *shown, attn_bias=bias))
        if reasons:
            return f"{operator.NAME}: {'; '.join(reasons)}"
    return None


class XformersAttention:
    """The backend.

    Args:
        operators: The kernels.
        sizes: Sizes that the kernels are compiled for, in recorded steps and in others; a larger step is a size of its
            own.
    """

    reads_whole_blocks = False

    def __init__(self, operators: Operators, sizes: StepSizes) -> None:
        self._operators = operators
        self._sizes = sizes

    def begin_step(self, layout: StepLayout, pool: KVPool) -> StepAttention:
        """See ``AttentionBackend.begin_step``."""
        parts: list[_Part] = []
        if layout.decode is not None:
            parts.append(self._decode(layout.decode, pool))
        if layout.prefill is not None:
            parts.append(self._prefill(layout.prefill, layout.num_decode, pool))
        return _StepAttention(pool, parts)

    def begin_static(self, decode: StaticDecode, pool: KVPool) -> StepAttention:
        """See ``AttentionBackend.begin_static``."""
        num_rows, width = decode.block_tables.shape
        kind = attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
        longest = [width * pool.block_size] * num_rows
        bias = _paged(kind, [1] * num_rows, longest, decode.block_tables, pool.block_size)
        bias.k_seqinfo.seqlen = decode.kv_lens  # read by the kernel at each step
        return _StepAttention(pool, [_Decode(slice(0, num_rows), num_rows, bias, self._operators.decode)])

    def _decode(self, part: DecodePart, pool: KVPool) -> _Decode:
        num_rows = len(part.kv_lens)
        tables = self._padded(part.block_tables)
        kind = attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
        kv_lens = [*part.kv_lens, *[0] * (len(tables) - num_rows)]
        bias = _paged(kind, [1] * len(tables), kv_lens, tables, pool.block_size)
        return _Decode(slice(0, num_rows), len(tables), bias, self._operators.decode)

    def _prefill(self, part: PrefillPart, first_row: int, pool: KVPool) -> _Part:
        operators = self._operators
        rows = slice(first_row, first_row + sum(part.chunk_lens))
        earlier_lens = [kv_len - chunk_len for kv_len, chunk_len in zip(part.kv_lens, part.chunk_lens, strict=True)]
        own = attn_bias.BlockDiagonalCausalMask.from_seqlens(list(part.chunk_lens), device=part.block_tables.device)
        if not any(earlier_lens):
            return _Causal(rows, own, operators.prompt, paged=False)
        if operators.chunks is not None:
            kind = attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
            bias = _paged(kind, list(part.chunk_lens), list(part.kv_lens), part.block_tables.int(), pool.block_size)
            return _Causal(rows, bias, operators.chunks, paged=True)
        tables = self._padded(part.block_tables)
        added = [0] * (len(tables) - len(part.kv_lens))
        kind, chunk_lens = attn_bias.PagedBlockDiagonalPaddedKeysMask, [*part.chunk_lens, *added]
        earlier = _paged(kind, chunk_lens, [*earlier_lens, *added], tables, pool.block_size)
        earlier.q_seqinfo.max_seqlen = round_up(max(part.chunk_lens), _CHUNK_STEP)
        return _Chunks(rows, own, earlier, operators)

    def _padded(self, tables: Tensor) -> Tensor:
        """Tables as the kernels read them, int32, padded to a size that repeats; added entries are block 0."""
        rows, width = tables.shape
        more_rows = (self._sizes.num_rows(rows) or rows) - rows
        return F.pad(tables.int(), (0, (self._sizes.width(width) or width) - width, 0, more_rows))


class _StepAttention:
    """One step: parts that cover the rows in order."""

    def __init__(self, pool: KVPool, parts: list[_Part]) -> None:
        self._pool = pool
        self._parts = parts

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See ``StepAttention.attend``."""
        assert sinks is None, "models with sinks are given to another backend"
        pages = self._pool.keys[layer], self._pool.values[layer]
        outputs = [part.attend(query, key, value, pages) for part in self._parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


Pages = tuple[Tensor, Tensor]
"""Keys and values of a layer of the pool, ``[slots, kv_heads, head_dim]``."""


class _Decode:
    """Rows of one query each, so many of them padding."""

    def __init__(self, rows: slice, num_padded: int, bias: Any, operator: Operator) -> None:
        self._rows = rows
        self._num_rows = rows.stop - rows.start
        self._num_added = num_padded - self._num_rows
        self._bias = bias
        self._operator = operator

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pages: Pages) -> Tensor:
        query = query[self._rows]
        if self._num_added:
            query = F.pad(query, (0, 0, 0, 0, 0, self._num_added))
        grouped = _grouped(query, key.shape[1])
        keys, values = _expanded(pages[0], grouped), _expanded(pages[1], grouped)
        out: Tensor = fmha.memory_efficient_attention_forward(grouped, keys, values, self._bias, op=self._operator)
        return out[0, : self._num_rows].reshape(self._num_rows, -1)


class _Causal:
    """Chunks in one causal call: over their own keys, where no tokens precede them, or over pages that hold all."""

    def __init__(self, rows: slice, bias: Any, operator: Operator, *, paged: bool) -> None:
        self._rows = rows
        self._bias = bias
        self._operator = operator
        self._paged = paged

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pages: Pages) -> Tensor:
        grouped = _grouped(query[self._rows], key.shape[1])
        keys, values = pages if self._paged else (key[self._rows], value[self._rows])
        out: Tensor = fmha.memory_efficient_attention_forward(
            grouped, _expanded(keys, grouped), _expanded(values, grouped), self._bias, op=self._operator
        )
        return out[0].reshape(grouped.shape[1], -1)


class _Chunks:
    """Chunks of which some stand behind earlier tokens."""

    def __init__(self, rows: slice, own: Any, earlier: Any, operators: Operators) -> None:
        self._rows = rows
        self._own = own
        self._earlier = earlier
        self._operators = operators

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pages: Pages) -> Tensor:
        grouped = _grouped(query[self._rows], key.shape[1])
        own, own_lse = fmha.memory_efficient_attention_partial(
            grouped,
            _expanded(key[self._rows], grouped),
            _expanded(value[self._rows], grouped),
            self._own,
            op=self._operators.prompt,
        )
        earlier, earlier_lse = fmha.memory_efficient_attention_partial(
            grouped,
            _expanded(pages[0], grouped),
            _expanded(pages[1], grouped),
            self._earlier,
            op=self._operators.pages,
        )
        merged = _merge(own.float(), own_lse.float(), earlier.float(), earlier_lse.float())
        return merged[0].to(query.dtype).reshape(grouped.shape[1], -1)


_Part = _Decode | _Causal | _Chunks


def _merge(own: Tensor, own_lse: Tensor, earlier: Tensor, earlier_lse: Tensor) -> Tensor:
    """Attention over both parts of the keys, as ``fmha.merge_attentions``, whose kernel is compiled for each row count.

    Args:
        own: ``[1, T, kv_heads, group, head_dim]``; ``earlier`` is the same over other keys.
        own_lse: ``[1, kv_heads, group, T]``; -inf where there are no keys.
    """
    share = (earlier_lse - own_lse).sigmoid()  # e^a / (e^a + e^b)
    return own.lerp(earlier, share.permute(0, 3, 1, 2)[..., None])


def _paged(kind: type[Any], q_lens: list[int], kv_lens: list[int], tables: Tensor, page_size: int) -> Any:
    return kind.from_seqlens(
        q_seqlen=q_lens, kv_seqlen=kv_lens, block_tables=tables, page_size=page_size, device=tables.device
    )


def round_up(number: int, step: int) -> int:
    """The next power of two; above ``step`` the next multiple of it."""
    return -(-number // step) * step if number > step else 1 << (number - 1).bit_length()


def _grouped(query: Tensor, kv_heads: int) -> Tensor:
    """``[T, heads, head_dim]`` -> ``[1, T, kv_heads, heads of a KV head, head_dim]``."""
    return query.reshape(1, len(query), kv_heads, -1, query.shape[-1])


def _expanded(cache: Tensor, grouped: Tensor) -> Tensor:
    """``[N, kv_heads, head_dim]`` -> ``[1, N, kv_heads, heads of a KV head, head_dim]``, without a copy."""
    return cache[None, :, :, None].expand(-1, -1, -1, grouped.shape[3], -1)
