"""Paged attention out of torch operations: gather the blocks, then ``scaled_dot_product_attention``.

Works on every device torch works on; the reference that other backends are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farsight.engine.attention.attention import (
    PLAIN_SCORES,
    DecodePart,
    PrefillPart,
    ScoreShape,
    StaticDecode,
    StepLayout,
    attend,
)
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.kv_pool import KVPool

_SCORE_BYTES = 16
"""Memory of a score: in float32 before and behind the softmax, in the type of the model, and of what becomes of it."""

Masks = dict[int | None, Tensor | None]
"""The mask that is added to the scores, by sliding window; no mask where plain causality suffices."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What attention takes in a layer at once, beside the keys and values of a single sequence.

    Attributes:
        blocks: Blocks of the pool that are gathered.
        scores: Products of queries and keys, of one head.
    """

    blocks: int
    scores: int

    @classmethod
    def of_bytes(cls, num_bytes: int, config: DecoderConfig, pool: KVPool) -> Bound:
        """Returns as much as fits into that memory: half of it for blocks, half for scores."""
        widest = max(config.shape(layer).kv_heads * config.shape(layer).head_dim for layer in config.kv_layers)
        tokens = num_bytes // 2 // (2 * widest * pool.dtype.itemsize)
        return cls(max(1, tokens // pool.block_size), num_bytes // 2 // (config.num_attention_heads * _SCORE_BYTES))

    def queries(self, keys: int) -> int:
        """Counts the queries that so many keys are multiplied with at once."""
        return max(1, self.scores // keys)


class TorchAttention:
    """The backend. Keeps the buffers that blocks are gathered into, so it runs one step at a time.

    Without them the allocator hands the pages of every gather back to the operating system and faults them in
    again: thousands of page faults a step, which cost more than the attention itself.

    Args:
        windows: By layer, the number of tokens that a token attends to, itself included; None for all.
        scores: What becomes of the products of queries and keys.
        bound: Memory that a layer of a step may take; None for whatever it needs.
    """

    reads_whole_blocks = True

    def __init__(
        self, windows: Sequence[int | None], scores: ScoreShape = PLAIN_SCORES, bound: Bound | None = None
    ) -> None:
        self._windows = tuple(windows)
        self._scores = scores
        self._bound = bound
        self._distinct = tuple(set(windows))
        self._buffers: tuple[Tensor, Tensor] | None = None  # flat: layers may have blocks of different sizes

    @classmethod
    def of_model(cls, config: DecoderConfig, bound: Bound | None = None) -> TorchAttention:
        """Returns attention as the layers of a model have it."""
        return cls(config.sliding_windows, ScoreShape.of_model(config), bound)

    def begin_step(self, layout: StepLayout, pool: KVPool) -> TorchStepAttention:
        """See ``AttentionBackend.begin_step``."""
        bound = self._bound
        decode = [] if layout.decode is None else _decode_groups(layout.decode, self._distinct, pool, bound)
        prefill = []
        if layout.prefill is not None:
            prefill = _prefill_chunks(layout.prefill, layout.num_decode, self._distinct, pool, bound)
        parts = [*decode, *prefill]
        least = 0 if bound is None else bound.blocks  # at once: what is measured of the largest step holds for all
        buffers = self._reserve(max(least, *(part.num_gathered for part in parts)), pool)
        return TorchStepAttention(pool, parts, self._windows, buffers, self._scores)

    def begin_static(self, decode: StaticDecode, pool: KVPool) -> TorchStaticAttention:
        """See ``AttentionBackend.begin_static``."""
        rows, width = decode.block_tables.shape
        at_once = rows if self._bound is None else max(1, self._bound.blocks // width)
        return TorchStaticAttention(pool, decode, self._windows, self._scores, at_once)

    def _reserve(self, num_blocks: int, pool: KVPool) -> tuple[Tensor, Tensor]:
        """Buffers for keys and values of ``num_blocks`` blocks of any layer at least, each ``[elements]``."""
        held = self._buffers
        block = max(keys.numel() for keys in pool.keys) // pool.num_blocks
        if held is None or len(held[0]) < num_blocks * block or held[0].dtype != pool.dtype:
            # doubling: lengths grow
            size = max(num_blocks * block, 2 * len(held[0]) if held and self._bound is None else 0)
            keys, values = (torch.empty(size, dtype=pool.dtype, device=pool.device) for _ in range(2))
            held = self._buffers = keys, values
        return held


class TorchStepAttention:
    """One step: parts that cover the rows in order, each of them one sdpa call a layer."""

    def __init__(
        self,
        pool: KVPool,
        parts: list[_Decode | _WholePrompt | _Chunk],
        windows: tuple[int | None, ...],
        buffers: tuple[Tensor, Tensor],
        scores: ScoreShape,
    ) -> None:
        self._scores = scores
        self._pool = pool
        self._parts = parts
        self._windows = windows
        self._buffers = buffers

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See ``StepAttention.attend``."""
        cache = _LayerCache(self._pool, layer, self._buffers, self._scores, sinks)
        window = self._windows[layer]
        outputs = [part.attend(query, key, value, window, cache) for part in self._parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class TorchStaticAttention:
    """Steps that only decode: every row is padded to the width of the table; so many rows are computed ``at_once``."""

    def __init__(
        self,
        pool: KVPool,
        decode: StaticDecode,
        windows: tuple[int | None, ...],
        scores: ScoreShape,
        at_once: int,
    ) -> None:
        self._at_once = at_once
        self._scores = scores
        self._pool = pool
        self._decode = decode
        self._windows = windows
        num_slots = decode.block_tables.shape[1] * pool.block_size
        self._positions = torch.arange(num_slots, device=decode.block_tables.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See ``StepAttention.attend``."""
        cuts = range(0, len(query), self._at_once)
        outputs = [self._rows(layer, query, slice(cut, cut + self._at_once), sinks) for cut in cuts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _rows(self, layer: int, query: Tensor, rows: slice, sinks: Tensor | None) -> Tensor:
        query = query[rows]
        num_rows, (kv_heads, head_dim) = len(query), self._pool.keys[layer].shape[1:]
        ends = self._decode.kv_lens[rows, None]
        hidden = self._positions >= ends
        window = self._windows[layer]
        if window is not None:
            hidden |= self._positions < ends - window
        block_ids = self._decode.block_tables[rows].flatten()
        keys, values = (
            cache.view(self._pool.num_blocks, -1)
            .index_select(0, block_ids)
            .view(num_rows, -1, kv_heads, head_dim)
            .transpose(1, 2)
            for cache in (self._pool.keys[layer], self._pool.values[layer])
        )
        folded = query.reshape(num_rows, kv_heads, -1, head_dim)
        mask = _additive(hidden, query.dtype)[:, None, None]
        return attend(folded, keys, values, mask, self._scores, sinks).reshape(num_rows, -1)


class _LayerCache:
    """One layer of the pool, read block by block."""

    def __init__(
        self, pool: KVPool, layer: int, buffers: tuple[Tensor, Tensor], scores: ScoreShape, sinks: Tensor | None
    ) -> None:
        self.scores = scores
        self.sinks = sinks
        self._caches = pool.keys[layer], pool.values[layer]
        self._buffers = buffers
        self.kv_heads, self.head_dim = pool.keys[layer].shape[1:]
        self._num_blocks = pool.num_blocks

    def gather(self, block_ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values, each ``[num_rows, kv_heads, tokens, head_dim]``; valid until the next call.

        Args:
            block_ids: int64 ``[num_rows * blocks]``, row by row.
        """
        key, value = (
            _gathered(cache.view(self._num_blocks, -1), block_ids, buffer)
            .view(num_rows, -1, self.kv_heads, self.head_dim)
            .transpose(1, 2)
            for cache, buffer in zip(self._caches, self._buffers, strict=True)
        )
        return key, value


def _gathered(blocks: Tensor, block_ids: Tensor, buffer: Tensor) -> Tensor:
    """Returns rows of ``[blocks, elements]``, copied into a flat buffer."""
    elements = blocks.shape[1]
    out = buffer[: len(block_ids) * elements].view(len(block_ids), elements)
    return torch.index_select(blocks, 0, block_ids, out=out)


class _Decode:
    """Rows of one query each, padded to the blocks of the longest."""

    def __init__(
        self, rows: slice, tables: Tensor, kv_lens: Sequence[int], windows: Sequence[int | None], pool: KVPool
    ) -> None:
        self._rows = rows
        self._block_ids = tables.flatten()
        positions = torch.arange(tables.shape[1] * pool.block_size, device=tables.device)
        ends = torch.tensor(kv_lens, device=tables.device)[:, None]

        def mask(window: int | None) -> Tensor:
            hidden = positions >= ends
            if window is not None:
                hidden |= positions < ends - window
            return _additive(hidden, pool.dtype)[:, None, None]

        self._masks = _masks(windows, kv_lens[0], mask)

    @property
    def num_gathered(self) -> int:
        return len(self._block_ids)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, cache: _LayerCache) -> Tensor:
        query = query[self._rows]
        num_rows = len(query)
        # Queries that share a KV head take the place of queries of one head: up to 5 times faster than
        # enable_gqa for bfloat16 on a CPU.
        folded = query.reshape(num_rows, cache.kv_heads, -1, cache.head_dim)
        keys, values = cache.gather(self._block_ids, num_rows)
        out = attend(folded, keys, values, self._masks[window], cache.scores, cache.sinks)
        return out.reshape(num_rows, -1)


class _WholePrompt:
    """A chunk from position 0: its own keys and values are all there is, so the pool is not read."""

    num_gathered = 0

    def __init__(self, rows: slice, windows: Sequence[int | None], pool: KVPool) -> None:
        self._rows = rows
        length = rows.stop - rows.start

        def mask(window: int | None) -> Tensor | None:
            if window is None:
                return None
            positions = torch.arange(length, device=pool.device)
            return _causal(positions, positions, window, pool.dtype)

        self._masks = _masks(windows, length, mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, cache: _LayerCache) -> Tensor:
        q, k, v = (tensor[self._rows].transpose(0, 1)[None] for tensor in (query, key, value))
        mask = self._masks[window]
        return _rows_of(attend(q, k, v, mask, cache.scores, cache.sinks, causal=mask is None, grouped=True))


class _Chunk:
    """A chunk behind earlier tokens; ``table`` covers the sequence up to its end."""

    def __init__(self, rows: slice, table: Tensor, kv_len: int, windows: Sequence[int | None], pool: KVPool) -> None:
        self._rows = rows
        self._block_ids = table
        positions = torch.arange(len(table) * pool.block_size, device=table.device)
        own = positions[kv_len - (rows.stop - rows.start) : kv_len]
        self._masks = _masks(windows, kv_len, lambda window: _causal(own, positions, window, pool.dtype))

    @property
    def num_gathered(self) -> int:
        return len(self._block_ids)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, cache: _LayerCache) -> Tensor:
        q = query[self._rows].transpose(0, 1)[None]
        keys, values = cache.gather(self._block_ids, 1)
        return _rows_of(attend(q, keys, values, self._masks[window], cache.scores, cache.sinks, grouped=True))


def _masks(windows: Sequence[int | None], longest: int, make: Callable[[int | None], Tensor | None]) -> Masks:
    """Returns a mask for each window; one that the longest sequence does not exceed is as good as none."""
    reaches = {window: None if window is None or window >= longest else window for window in windows}
    made = {reach: make(reach) for reach in set(reaches.values())}
    return {window: made[reach] for window, reach in reaches.items()}


def _causal(queries: Tensor, keys: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Returns a mask ``[queries, keys]`` by their positions."""
    hidden = keys > queries[:, None]
    if window is not None:
        hidden |= keys <= queries[:, None] - window
    return _additive(hidden, dtype)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask to be added to scores: -inf where ``hidden``, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _rows_of(out: Tensor) -> Tensor:
    """``[1, heads, rows, head_dim]`` -> ``[rows, heads * head_dim]``."""
    return out[0].transpose(0, 1).reshape(out.shape[2], -1)


def _decode_groups(part: DecodePart, windows: Sequence[int | None], pool: KVPool, bound: Bound | None) -> list[_Decode]:
    """Cuts the rows, longest first, so that none is padded to more than twice its blocks.

    One long sequence would otherwise make every short one pay for its length.
    """
    num_blocks = [-(-kv_len // pool.block_size) for kv_len in part.kv_lens]
    groups = []
    first = 0
    for end in range(1, len(num_blocks) + 1):
        fits = bound is None or (end + 1 - first) * num_blocks[first] <= bound.blocks
        if fits and end < len(num_blocks) and 2 * num_blocks[end] >= num_blocks[first]:
            continue
        rows = slice(first, end)
        tables = part.block_tables[rows, : num_blocks[first]]
        groups.append(_Decode(rows, tables, part.kv_lens[rows], windows, pool))
        first = end
    return groups


def _prefill_chunks(
    part: PrefillPart, first_row: int, windows: Sequence[int | None], pool: KVPool, bound: Bound | None
) -> list[_WholePrompt | _Chunk]:
    chunks: list[_WholePrompt | _Chunk] = []
    for table, chunk_len, kv_len in zip(part.block_tables, part.chunk_lens, part.kv_lens, strict=True):
        start, size = kv_len - chunk_len, chunk_len if bound is None else bound.queries(kv_len)
        while start < kv_len:  # keys of the whole chunk are in the pool: its parts are chunks too
            stop = min(start + size, kv_len)
            rows = slice(first_row, first_row + stop - start)
            if start == 0:
                chunks.append(_WholePrompt(rows, windows, pool))
            else:
                chunks.append(_Chunk(rows, table[: -(-stop // pool.block_size)], stop, windows, pool))
            first_row, start = rows.stop, stop
    return chunks
