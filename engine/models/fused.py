"""The operations between matrix products and attention, one Triton kernel each: norms, rotary embedding, gated MLP.

A recorded decode step is a chain of hundreds of kernels, and each takes 2 microseconds or so however little it
computes: at batch 1 torch's operations would cost a quarter of the time in which a 7B model's weights are read.
Rounding is that of the torch operations in ``engine.models.layers``, one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from farsight.engine.checkpoint.families.record import ClampedGate
from farsight.engine.checkpoint.layers import Norm

_GATED_BLOCK = 1024
"""Columns that a program of ``gated`` computes."""


@triton.jit  # type: ignore[untyped-decorator]
def _normed(  # type: ignore[no-untyped-def]
    row,
    weight,
    bias,
    columns,
    inside,
    size,
    eps,
    dtype: tl.constexpr,
    LAYER: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Normalises a row of float32, ``LAYER``-Norm or RMS, and rounds it where torch does."""
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        row = tl.where(inside, row - tl.sum(row) / size, 0.0)
    scaled = row * tl.rsqrt(tl.sum(row * row) / size + eps)
    if not LAYER:
        scaled = scaled.to(dtype).to(tl.float32)
    made = scaled * factors
    if BIAS:
        made += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return made.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    hidden,
    delta,
    after,
    after_bias,
    weight,
    bias,
    normed,
    size,
    eps,
    factor,
    HAS_DELTA: tl.constexpr,
    AFTER: tl.constexpr,
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    LAYER: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = hidden.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    places = tl.program_id(0).to(tl.int64) * size + columns
    row = tl.load(hidden + places, mask=inside, other=0.0)
    if HAS_DELTA:
        more = tl.load(delta + places, mask=inside, other=0.0)
        if AFTER:
            more = _normed(more.to(tl.float32), after, after_bias, columns, inside, size, eps, dtype, LAYER, BIAS)
        if SCALED:
            more = (more.to(tl.float32) * factor).to(dtype)
        row = (row.to(tl.float32) + more.to(tl.float32)).to(dtype)
        tl.store(hidden + places, row, mask=inside)
    if NORM:
        made = _normed(row.to(tl.float32), weight, bias, columns, inside, size, eps, dtype, LAYER, BIAS)
        tl.store(normed + places, made, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(up, out, size, alpha, limit, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    dtype: tl.constexpr = up.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(up + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(up + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, limit).to(dtype).to(tl.float32)
        factors = tl.minimum(tl.maximum(factors, -limit), limit).to(dtype).to(tl.float32)
        factors = (factors + 1).to(dtype).to(tl.float32)
        steep = (gate * alpha).to(dtype).to(tl.float32)
        activated = gate * (1 / (1 + tl.exp(-steep))).to(dtype).to(tl.float32)
    elif ACTIVATION == "silu":
        activated = gate / (1 + tl.exp(-gate))
    elif ACTIVATION == "relu":
        activated = tl.maximum(gate, 0.0)
    elif ACTIVATION == "gelu":
        activated = gate * 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
    else:  # gelu_tanh: half of 1 + tanh(x) is the sigmoid of 2 x
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        activated = gate / (1 + tl.exp(-twice))
    activated = activated.to(dtype).to(tl.float32)
    tl.store(out + row * size + columns, (activated * factors).to(dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _head_values(start, columns, inside, weight, scale, dtype: tl.constexpr, NORMED: tl.constexpr):  # type: ignore[no-untyped-def]
    values = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        values = ((values * scale).to(dtype).to(tl.float32) * factors).to(dtype).to(tl.float32)
    return values


# Positions and slots are rows of one tensor: where they begin depends on the number of tokens.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])  # type: ignore[untyped-decorator]
def _rotate_and_store(  # type: ignore[no-untyped-def]
    heads,
    value,
    norms,
    cos,
    sin,
    positions,
    slots,
    keys,
    values,
    heads_stride,
    value_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORMED: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Computes one head of one row: of the queries, then of the keys, then of the values."""
    dtype: tl.constexpr = heads.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    columns = tl.arange(0, DIM_BLOCK)
    whole = columns < HEAD_DIM
    if head >= NUM_HEADS + KV_HEADS:
        kv_head = head - NUM_HEADS - KV_HEADS
        held = tl.load(value + row * value_stride + kv_head * HEAD_DIM + columns, mask=whole, other=0.0)
        tl.store(values + (slot * KV_HEADS + kv_head) * HEAD_DIM + columns, held, mask=whole)
    else:
        is_key = head >= NUM_HEADS
        start = heads + row * heads_stride + head * HEAD_DIM
        target = keys + (slot * KV_HEADS + head - NUM_HEADS) * HEAD_DIM
        weight = norms + is_key.to(tl.int32) * HEAD_DIM
        scale = 1.0
        if NORMED:
            all_values = tl.load(start + columns, mask=whole, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(all_values * all_values) / HEAD_DIM + eps)
        half: tl.constexpr = ROTARY_DIM // 2
        if ROTARY_DIM < HEAD_DIM:
            rest = (columns >= ROTARY_DIM) & whole
            kept = _head_values(start, columns, rest, weight, scale, dtype, NORMED).to(dtype)
        if ROTARY_DIM > 0:
            turned = tl.arange(0, HALF_BLOCK)
            inside = turned < half
            angle = tl.load(positions + row) * ROTARY_DIM + turned
            first = _head_values(start, turned, inside, weight, scale, dtype, NORMED)
            second = _head_values(start, half + turned, inside, weight, scale, dtype, NORMED)
            # The sines of the first half carry the minus sign.
            first_cos = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
            first_sin = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
            second_cos = tl.load(cos + angle + half, mask=inside, other=0.0).to(tl.float32)
            second_sin = tl.load(sin + angle + half, mask=inside, other=0.0).to(tl.float32)
            new_first = ((first * first_cos).to(dtype).to(tl.float32) + second * first_sin).to(dtype)
            new_second = ((second * second_cos).to(dtype).to(tl.float32) + first * second_sin).to(dtype)
            tl.store(start + turned, new_first, mask=inside)
            tl.store(start + half + turned, new_second, mask=inside)
            if is_key:
                tl.store(target + turned, new_first, mask=inside)
                tl.store(target + half + turned, new_second, mask=inside)
        if ROTARY_DIM < HEAD_DIM:
            if NORMED:
                tl.store(start + columns, kept, mask=rest)
            if is_key:
                tl.store(target + columns, kept, mask=rest)


def add_norm(
    hidden: Tensor,
    delta: Tensor | None,
    norm: Norm | None,
    eps: float,
    *,
    after: Norm | None = None,
    factor: float = 1.0,
    layer: bool = False,
) -> Tensor:
    """Returns a norm of ``hidden + factor * delta``, to which ``hidden`` is changed.

    Args:
        hidden: ``[T, hidden]``, contiguous; ``delta`` is the same, None for nothing.
        norm: None for ``hidden`` itself.
        after: A norm of ``delta``; None for ``delta`` itself.
        layer: Whether the norms are LayerNorms; otherwise RMSNorms.
    """
    if delta is None and norm is None:
        return hidden
    rows, size = hidden.shape
    block = triton.next_power_of_2(size)
    normed = hidden if norm is None else torch.empty_like(hidden)
    own, behind = norm or Norm(hidden, None), after or Norm(hidden, None)
    has_bias = own.bias is not None or behind.bias is not None
    _add_norm[(rows,)](
        hidden,
        hidden if delta is None else delta,
        behind.weight,
        hidden if behind.bias is None else behind.bias,
        own.weight,
        hidden if own.bias is None else own.bias,
        normed,
        size,
        eps,
        factor,
        HAS_DELTA=delta is not None,
        AFTER=after is not None,
        SCALED=factor != 1,
        NORM=norm is not None,
        LAYER=layer,
        BIAS=has_bias,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return normed


def gated(up: Tensor, activation: str = "silu", clamp: ClampedGate | None = None) -> Tensor:
    """Computes ``activation(gate) * up`` of ``[T, 2 * size]``, contiguous, of which the first half is the gate.

    Args:
        activation: As of ``DecoderConfig``.
        clamp: Takes its place, if there is one.
    """
    rows, size = len(up), up.shape[1] // 2
    out = up.new_empty(rows, size)
    alpha, limit = (0.0, 0.0) if clamp is None else (clamp.alpha, clamp.limit)
    kind = activation if clamp is None else "clamped"
    grid = rows, triton.cdiv(size, _GATED_BLOCK)
    _gated[grid](up, out, size, float(alpha), float(limit), ACTIVATION=kind, BLOCK=_GATED_BLOCK)
    return out


def rotate_and_store(
    heads: Tensor,
    value: Tensor | None,
    rotation: tuple[Tensor, Tensor] | None,
    positions: Tensor,
    slot_ids: Tensor,
    pages: tuple[Tensor, Tensor],
    norms: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Turns queries and keys by the rotary embedding, in place; writes keys and values into the pool as well.

    Args:
        heads: ``[T, heads + kv_heads, head_dim]``; the heads of a row lie one behind the other.
        value: ``[T, kv_heads, head_dim]``, likewise; None where the keys are the values.
        rotation: Cosines and sines of all positions, ``[max_len, 1, rotary_dim]``, as of ``DecoderLayers``; None:
            nothing is turned.
        positions: int64 ``[T]``; ``slot_ids`` too, where in the pool a row's key and value go.
        pages: Keys and values of a layer of the pool, each ``[slots, kv_heads, head_dim]``.
        norms: Weights of the RMSNorm of each head before it is turned, ``[2, head_dim]``: of queries, then of keys.
    """
    rows, num_all, head_dim = heads.shape
    kv_heads = pages[0].shape[1]
    cos, sin = (heads, heads) if rotation is None else rotation
    rotary_dim = 0 if rotation is None else cos.shape[-1]
    _rotate_and_store[(rows, num_all + (0 if value is None else kv_heads))](
        heads,
        heads if value is None else value,
        heads if norms is None else norms,
        cos,
        sin,
        positions,
        slot_ids,
        *pages,
        heads.stride(0),
        heads.stride(0) if value is None else value.stride(0),
        eps,
        NUM_HEADS=num_all - kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        NORMED=norms is not None,
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        HALF_BLOCK=triton.next_power_of_2(max(2, rotary_dim) // 2),
        num_warps=1,
    )
