"""The operations between matrix products and attention, one Triton kernel each: RMSNorm, rotary embedding, gated SiLU.

A recorded decode step is a chain of hundreds of kernels, and each takes 2 microseconds or so however little it
computes: at batch 1 torch's operations would cost a quarter of the time in which a 7B model's weights are read.
Rounding is that of the torch operations in ``engine.models.layers``, one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from farsight.engine.attention.attention import StepAttention, StepLayout
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.kv_pool import KVPool
from farsight.engine.models.layers import DecoderLayers, linear

_GATED_BLOCK = 1024
"""Columns that a program of ``gated`` computes."""


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(hidden, delta, weight, normed, size, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    dtype = hidden.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    places = tl.program_id(0).to(tl.int64) * size + columns
    row = tl.load(hidden + places, mask=inside, other=0.0)
    if HAS_DELTA:
        more = tl.load(delta + places, mask=inside, other=0.0)
        row = (row.to(tl.float32) + more.to(tl.float32)).to(dtype)
        tl.store(hidden + places, row, mask=inside)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / size + eps)
    scaled = (wide * scale).to(dtype).to(tl.float32)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + places, (scaled * factors).to(dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(up, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    dtype = up.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(up + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(up + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * size + columns, (activated * factors).to(dtype), mask=inside)


# Positions and slots are rows of one tensor: where they begin depends on the number of tokens.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])  # type: ignore[untyped-decorator]
def _rotate_and_store(  # type: ignore[no-untyped-def]
    heads,
    value,
    cos,
    sin,
    positions,
    slots,
    keys,
    values,
    heads_stride,
    value_stride,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Computes one head of one row: of the queries, then of the keys, then of the values."""
    dtype = heads.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    columns = tl.arange(0, DIM_BLOCK)
    if head >= NUM_HEADS + KV_HEADS:
        kv_head = head - NUM_HEADS - KV_HEADS
        whole = columns < HEAD_DIM
        held = tl.load(value + row * value_stride + kv_head * HEAD_DIM + columns, mask=whole, other=0.0)
        tl.store(values + (slot * KV_HEADS + kv_head) * HEAD_DIM + columns, held, mask=whole)
    else:
        half: tl.constexpr = ROTARY_DIM // 2
        turned = tl.arange(0, HALF_BLOCK)
        inside = turned < half
        start = heads + row * heads_stride + head * HEAD_DIM
        angle = tl.load(positions + row) * ROTARY_DIM + turned
        first = tl.load(start + turned, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(start + half + turned, mask=inside, other=0.0).to(tl.float32)
        # The sines of the first half carry the minus sign.
        first_cos = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        first_sin = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        second_cos = tl.load(cos + angle + half, mask=inside, other=0.0).to(tl.float32)
        second_sin = tl.load(sin + angle + half, mask=inside, other=0.0).to(tl.float32)
        new_first = ((first * first_cos).to(dtype).to(tl.float32) + second * first_sin).to(dtype)
        new_second = ((second * second_cos).to(dtype).to(tl.float32) + first * second_sin).to(dtype)
        tl.store(start + turned, new_first, mask=inside)
        tl.store(start + half + turned, new_second, mask=inside)
        if head >= NUM_HEADS:
            target = keys + (slot * KV_HEADS + head - NUM_HEADS) * HEAD_DIM
            tl.store(target + turned, new_first, mask=inside)
            tl.store(target + half + turned, new_second, mask=inside)
            if ROTARY_DIM < HEAD_DIM:
                rest = (columns >= ROTARY_DIM) & (columns < HEAD_DIM)
                tl.store(target + columns, tl.load(start + columns, mask=rest, other=0.0), mask=rest)


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Returns RMSNorm of ``hidden + delta``, to which ``hidden`` is changed.

    Args:
        hidden: ``[T, hidden]``, contiguous; ``delta`` is the same, None for nothing.
        weight: ``[hidden]``.
    """
    rows, size = hidden.shape
    block = triton.next_power_of_2(size)
    normed = torch.empty_like(hidden)
    _add_norm[(rows,)](
        hidden,
        hidden if delta is None else delta,
        weight,
        normed,
        size,
        eps,
        HAS_DELTA=delta is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return normed


def gated(up: Tensor) -> Tensor:
    """Computes ``silu(gate) * up`` of ``[T, 2 * size]``, contiguous, of which the first half is the gate."""
    rows, size = len(up), up.shape[1] // 2
    out = up.new_empty(rows, size)
    _gated[(rows, triton.cdiv(size, _GATED_BLOCK))](up, out, size, BLOCK=_GATED_BLOCK)
    return out


def rotate_and_store(
    heads: Tensor,
    value: Tensor,
    rotation: tuple[Tensor, Tensor],
    positions: Tensor,
    slot_ids: Tensor,
    pages: tuple[Tensor, Tensor],
) -> None:
    """Turns queries and keys by the rotary embedding, in place; writes keys and values into the pool as well.

    Args:
        heads: ``[T, heads + kv_heads, head_dim]``; the heads of a row lie one behind the other.
        value: ``[T, kv_heads, head_dim]``, likewise.
        rotation: Cosines and sines of all positions, ``[max_len, 1, rotary_dim]``, as of ``DecoderLayers``.
        positions: int64 ``[T]``; ``slot_ids`` too, where in the pool a row's key and value go.
        pages: Keys and values of a layer of the pool, each ``[slots, kv_heads, head_dim]``.
    """
    cos, sin = rotation
    rows, kv_heads, head_dim = value.shape
    rotary_dim = cos.shape[-1]
    _rotate_and_store[(rows, heads.shape[1] + kv_heads)](
        heads,
        value,
        cos,
        sin,
        positions,
        slot_ids,
        *pages,
        heads.stride(0),
        value.stride(0),
        NUM_HEADS=heads.shape[1] - kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        HALF_BLOCK=triton.next_power_of_2(rotary_dim // 2),
        num_warps=1,
    )


def can_fuse(config: DecoderConfig) -> bool:
    """Returns whether there are kernels for such layers."""
    return config.norm == "rms" and config.activation == "silu" and config.rotary is not None and config.plain


class FusedLayers(DecoderLayers):
    """The same numbers as ``DecoderLayers``, for models that ``can_fuse`` accepts."""

    def run(self, hidden: Tensor, layout: StepLayout, pool: KVPool, attention: StepAttention) -> Tensor:
        assert self._tables is not None, "rotary"
        eps, delta = self.config.norm_eps, None
        self.middle = None
        tables, positions = self._tables, layout.positions
        if layout.given is not None and layout.given.positions is not None:
            rotation = self._rotation(layout)
            assert rotation is not None, "rotary"
            tables, positions = rotation, torch.arange(len(positions), device=positions.device)
        for i, layer in enumerate(self._layers):
            self._keep_middle(i, hidden, delta)
            assert layer.input_norm is not None and layer.post_norm is not None, "plain"
            assert layer.up is not None and layer.down is not None, "plain"
            normed = add_norm(hidden, delta, layer.input_norm.weight, eps)
            heads, value = self._split(linear(normed, layer.qkv), layer)
            pages = pool.keys[i], pool.values[i]
            rotate_and_store(heads, value, tables, positions, layout.slot_ids, pages)
            num_heads = self.config.num_attention_heads
            attended = attention.attend(i, heads[:, :num_heads], heads[:, num_heads:], value)
            normed = add_norm(hidden, self._add_up(linear(attended, layer.out)), layer.post_norm.weight, eps)
            delta = self._add_up(linear(gated(linear(normed, layer.up)), layer.down))
        if delta is not None:
            hidden += delta
        return hidden
