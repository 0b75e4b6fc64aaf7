"""Paged attention in Triton: one kernel for rows of one token and for chunks of tokens, one that adds up a row's parts.

A program takes one KV head and the heads of queries that share it, for one token or a block of consecutive tokens. It
walks over tiles of keys with a running maximum and sum, as flash attention does. Keys of a row are cut into parts that
other programs take; what they yield is added up by a second kernel. How a row is cut depends on its own length alone,
so its sums have one order in any batch.

Lengths, tables, strides and the least length of a part come at run time, and Triton does not compile for values of
them. So one compilation serves all steps of a model: head size, heads in a group, page size, and whether there are
windows, caps, slopes and sinks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_PARTS = 32
"""Parts that the keys of a row are cut into at most, which bounds the memory for what parts yield; a power of two."""

LEAST_PART = 256
"""Keys of a part at least; a multiple of the keys of a tile."""

WIDE_HEAD = 256
"""Values of a head above which a program takes ``WIDE_GROUP`` heads of a group at most, and keys are cut into
``WIDE_PARTS`` at most: registers hold no more."""

WIDE_GROUP, WIDE_PARTS = 16, 8

_UNIT = 16
"""Strides are told in so many elements: what is read at once begins at a multiple of 16 bytes."""

BASE_2 = math.log2(math.e)
"""Factor of exponents of e that are taken as exponents of 2."""

_IN_BASE_2 = tl.constexpr(BASE_2)
_BELOW = tl.constexpr(-1.0e30)  # not -inf: the difference of two maxima stays a number where no key is seen yet


@triton.jit  # type: ignore[untyped-decorator]
def _part_length(span, least, PARTS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tells how many keys each part of ``span`` keys has: the one rule."""
    share = (span + PARTS - 1) // PARTS
    return tl.maximum((share + TILE - 1) // TILE * TILE, least)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["query_stride", "slot_stride", "table_stride", "window", "least"],
    do_not_specialize_on_alignment=["tables", "work"],
)
def _attend(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    tables,
    work,
    sinks,
    slopes,
    out,
    sums,
    query_stride,
    slot_stride,
    table_stride,
    scale,
    cap,
    window,
    least,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    UNIT: tl.constexpr,
    IN_PARTS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    SINKS: tl.constexpr,
    SHARES: tl.constexpr,
    ONE_ROW: tl.constexpr,
):
    """Takes one token and a part of its keys (``IN_PARTS``), or a block of a chunk's tokens and all their keys."""
    item = tl.program_id(0)
    share = tl.program_id(1)
    kv_head = share // SHARES
    if IN_PARTS:
        table = item
        first_row = item
        num_tokens = 1
        first = tl.load(work + item) - 1
    else:
        table = tl.load(work + item * 4)
        first_row = tl.load(work + item * 4 + 1)
        num_tokens = tl.load(work + item * 4 + 2)
        first = tl.load(work + item * 4 + 3)
    stop = first + num_tokens
    begin = 0
    if WINDOWED:  # a tile lies in one page where a page holds tiles: it begins at a multiple of its keys
        begin = tl.maximum(first - window + 1, 0) // TILE * TILE
    if IN_PARTS:
        part = tl.program_id(2)
        length = _part_length(stop - begin, least, PARTS, TILE)
        if part * length >= stop - begin:
            return
        begin = begin + part * length
        stop = tl.minimum(begin + length, stop)

    rows = tl.arange(0, ROWS)
    token = rows // GROUP
    head = share * GROUP + rows % GROUP
    used = token < num_tokens
    position = first + token
    dims = tl.arange(0, DIMS)
    places = (
        (first_row + token).to(tl.int64)[:, None] * (query_stride * UNIT) + head[:, None] * HEAD_DIM + dims[None, :]
    )
    whole: tl.constexpr = HEAD_DIM == DIMS
    inside = used[:, None] if whole else used[:, None] & (dims < HEAD_DIM)[None, :]
    heads = tl.load(query + places, mask=inside, other=0.0)

    if SINKS and not IN_PARTS:
        most = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * _IN_BASE_2
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        most = tl.full([ROWS], _BELOW, tl.float32)
        total = tl.full([ROWS], 0.0, tl.float32)
    if SLOPED:
        slope = tl.load(slopes + head, mask=used, other=0.0)
    result = tl.full([ROWS, DIMS], 0.0, tl.float32)

    for start in range(begin, stop, TILE):
        at = start + tl.arange(0, TILE)
        there = at < stop
        if PAGE % TILE == 0:
            block = tl.load(tables + table * table_stride + start // PAGE).to(tl.int64)
            slots = block * PAGE + (start % PAGE + tl.arange(0, TILE))
        else:
            blocks = tl.load(tables + table * table_stride + at // PAGE, mask=there, other=0).to(tl.int64)
            slots = blocks * PAGE + at % PAGE
        offsets = slots[:, None] * (slot_stride * UNIT) + kv_head * HEAD_DIM + dims[None, :]
        # Slots behind the end are not read: they may hold anything, also NaN.
        read = there[:, None] if whole else there[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(keys + offsets, mask=read, other=0.0)
        scores = tl.dot(heads, tl.trans(key)) * scale
        if CAPPED:  # cap * tanh(s / cap), in base 2; ``scale`` has made of s twice what tanh is taken of
            scores = cap - 2 * cap / (tl.exp(scores) + 1)
        if SLOPED:
            scores += slope[:, None] * (at[None, :] - position[:, None])
        seen = there[None, :] & (at[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (at[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrunk = tl.exp2(most - higher)
        total = total * shrunk + tl.sum(weights, 1)
        value = key if ONE_ROW else tl.load(values + offsets, mask=read, other=0.0)
        result = result * shrunk[:, None] + tl.dot(weights.to(value.dtype), value)
        most = higher

    result = result / total[:, None]
    num_heads = tl.num_programs(1) * GROUP
    targets = (first_row + token).to(tl.int64) * num_heads + head
    if IN_PARTS:
        targets = targets * PARTS + part
        tl.store(sums + targets, most + tl.log2(total), mask=used)
    tl.store(out + targets[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["window", "least"], do_not_specialize_on_alignment=["work"])  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]
    parts,
    sums,
    work,
    sinks,
    out,
    window,
    least,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Adds up one head of one row: its parts, each with the logarithm of its sum, in their order."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    span = tl.load(work + row)
    if WINDOWED:
        span = span - tl.maximum(span - window, 0) // TILE * TILE
    length = _part_length(span, least, PARTS, TILE)
    index = tl.arange(0, PARTS)
    there = index * length < span
    target = row.to(tl.int64) * tl.num_programs(1) + head
    dims = tl.arange(0, DIMS)
    inside = dims < HEAD_DIM
    logs = tl.load(sums + target * PARTS + index, mask=there, other=float("-inf"))
    offsets = (target * PARTS + index)[:, None] * HEAD_DIM + dims[None, :]
    yielded = tl.load(parts + offsets, mask=there[:, None] & inside[None, :], other=0.0)
    most = tl.maximum(tl.max(logs, 0), _BELOW)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * _IN_BASE_2
        most = tl.maximum(most, sink)
    weights = tl.exp2(logs - most)
    total = tl.sum(weights, 0)
    if SINKS:
        total = total + tl.exp2(sink - most)
    result = tl.sum(weights[:, None] * yielded, 0) / total
    tl.store(out + target * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How much a program takes at once.

    Attributes:
        rows: Heads of queries: those of a group for each token. A power of two.
        keys: Likewise.
        stages: Tiles of keys that are on their way at once.
    """

    rows: int
    keys: int
    warps: int
    stages: int

    @classmethod
    def of_rows(cls, group: int, head_dim: int) -> Tiles:
        """Gives those of single tokens: memory is the limit (measured best: 32 keys, 5 stages)."""
        rows = max(16, triton.next_power_of_2(group))
        if head_dim > WIDE_HEAD:
            return cls(rows, 32, 8, 2)
        return cls(rows, 32, min(8, max(2, rows // 16)), 5 if head_dim <= 128 else 3)

    @classmethod
    def of_chunks(cls, group: int, head_dim: int) -> Tiles:
        """Gives those of chunks: products are the limit, so large ones."""
        if head_dim > WIDE_HEAD:
            return cls.of_rows(group, head_dim)  # twice as many rows would spill
        rows = max(128, triton.next_power_of_2(group))
        return cls(rows, 64, 8, 3) if head_dim <= 128 else cls(rows, 32, 8, 3)


@dataclass(frozen=True, slots=True)
class PagedLaunch:
    """Gives the programs of a launch their work, the same in each layer: rows of a step, or chunks.

    Attributes:
        tables: int32 ``[sequences, width]``.
        items: int32. For rows: ``[rows]``, tokens each attends over. For chunks: ``[blocks, 4]``, for each block of
            consecutive tokens the row of its table, its first row, its tokens and the position of the first.
        most_parts: Parts that the longest row is cut into at most; 0 for chunks.
    """

    tables: Tensor
    items: Tensor
    most_parts: int


@dataclass(frozen=True, slots=True)
class PagedKernels:
    """The kernels for one model over one pool.

    Attributes:
        page: Tokens in a block of the pool.
        scale: Factor of the products.
        cap: As of ``ScoreShape``.
        slopes: ALiBi's, float32 ``[heads]`` on the device, in base 2; None without.
        least_part: Keys of a part of a row at least.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page: int
    scale: float
    cap: float | None
    slopes: Tensor | None
    least_part: int = LEAST_PART

    @property
    def block_tokens(self) -> int:
        """Tokens of a chunk that a program takes."""
        group, _ = self._group
        return Tiles.of_chunks(group, self.head_dim).rows // group

    @property
    def _group(self) -> tuple[int, int]:
        """Heads of a group that a program takes, and programs that share the group's KV head."""
        group = self.heads // self.kv_heads
        if self.head_dim <= WIDE_HEAD or group <= WIDE_GROUP:
            return group, 1
        return WIDE_GROUP, group // WIDE_GROUP

    @property
    def most_parts(self) -> int:
        """Parts that the keys of a row are cut into at most."""
        return MOST_PARTS if self.head_dim <= WIDE_HEAD else WIDE_PARTS

    def num_parts(self, longest: int) -> int:
        """Counts the parts that a row of so many tokens is cut into at most."""
        return max(1, min(self.most_parts, -(-longest // self.least_part)))

    def scratch(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Takes memory for what the parts of so many rows yield, and for the logarithms of their sums."""
        shape = (rows, self.heads, self.most_parts)
        return (
            torch.empty(*shape, self.head_dim, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )

    def run(
        self,
        launch: PagedLaunch,
        query: Tensor,
        pages: tuple[Tensor, Tensor],
        out: Tensor,
        scratch: tuple[Tensor, Tensor],
        window: int | None,
        sinks: Tensor | None,
    ) -> None:
        """Attends with the rows of a part of a step in one layer.

        Args:
            query: ``[T, heads, head_dim]``; the heads of a row lie one behind the other.
            pages: Keys and values of the layer, each ``[slots, kv_heads, head_dim]``.
            out: ``[T, heads * head_dim]``; the rows of the part are written.
            scratch: From ``scratch``, for as many rows at least; for chunks it is not used.
            window: Tokens that a token attends to, itself included; None for all.
            sinks: ``[heads]``; None without.
        """
        group, shares = self._group
        in_parts = launch.most_parts > 0
        tiles = (Tiles.of_rows if in_parts else Tiles.of_chunks)(group, self.head_dim)
        parts, sums = scratch if in_parts else (out, out)
        dims = triton.next_power_of_2(self.head_dim)
        reach = window or 0
        common = {"HEAD_DIM": self.head_dim, "DIMS": dims, "TILE": tiles.keys, "PARTS": self.most_parts}
        flags = {"WINDOWED": window is not None, "SINKS": sinks is not None}
        _attend[(len(launch.items), self.kv_heads * shares, max(1, launch.most_parts))](
            query,
            *pages,
            launch.tables,
            launch.items,
            query if sinks is None else sinks,
            query if self.slopes is None else self.slopes,
            parts,
            sums,
            query.stride(0) // _UNIT,
            pages[0].stride(0) // _UNIT,
            launch.tables.stride(0),
            self.scale * (BASE_2 if self.cap is None else 2 / self.cap),
            (self.cap or 0.0) * BASE_2,
            reach,
            self.least_part,
            GROUP=group,
            PAGE=self.page,
            ROWS=tiles.rows,
            UNIT=_UNIT,
            IN_PARTS=in_parts,
            CAPPED=self.cap is not None,
            SLOPED=self.slopes is not None,
            SHARES=shares,
            ONE_ROW=pages[0].data_ptr() == pages[1].data_ptr(),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **common,
            **flags,
        )
        if in_parts:
            _add_up[(len(launch.items), self.heads)](
                parts,
                sums,
                launch.items,
                query if sinks is None else sinks,
                out,
                reach,
                self.least_part,
                num_warps=8,
                **common,
                **flags,
            )
