"""The experts of a layer as products of groups: pairs of token and expert lie sorted, and a group has its matrix.

Nothing of it waits for the device, and the number of programs follows from the number of tokens alone: a program looks
up which rows of which expert are its own, and ends at once where there are none. So such steps can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from farsight.engine.checkpoint.layers import ExpertWeights, Linear, Matrix


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    rows,
    order,
    ends,
    matrices,
    biases,
    out,
    inputs,
    outputs,
    num_experts,
    ACTIVE: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATHER: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Computes some columns of some pairs of one expert: the block of that number, counted expert by expert."""
    block = tl.program_id(0)
    numbers = tl.arange(0, EXPERTS)
    known = numbers < num_experts
    stops = tl.load(ends + numbers, mask=known, other=0).to(tl.int32)
    starts = tl.load(ends + numbers - 1, mask=known & (numbers > 0), other=0).to(tl.int32)
    blocks = (stops - starts + ROWS - 1) // ROWS
    behind = tl.cumsum(blocks, 0)
    expert = tl.sum((behind <= block).to(tl.int32), 0)
    if expert >= num_experts:
        return
    mine = numbers == expert
    first = tl.sum(tl.where(mine, starts + (block - behind + blocks) * ROWS, 0), 0)
    stop = tl.sum(tl.where(mine, stops, 0), 0)
    row = first + tl.arange(0, ROWS)
    used = row < stop
    pair = tl.load(order + row, mask=used, other=0)
    source = (pair // ACTIVE if GATHER else row).to(tl.int64)
    target = (row if GATHER else pair).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < outputs
    matrix = tl.load(matrices + expert).to(tl.pointer_type(rows.dtype.element_ty))
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for begin in range(0, inputs, DEPTH):
        at = begin + tl.arange(0, DEPTH)
        inside = at < inputs
        values = tl.load(rows + source[:, None] * inputs + at[None, :], mask=used[:, None] & inside[None, :], other=0.0)
        places = tl.multiple_of(matrix, 16) + column[None, :] * inputs + at[:, None]
        weights = tl.load(places, mask=there[None, :] & inside[:, None], other=0.0)
        total = tl.dot(values, weights, total, input_precision="ieee")
    if BIAS:
        total += tl.load(biases + expert * outputs + column, mask=there, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + target[:, None] * outputs + column[None, :],
        total.to(out.dtype.element_ty),
        mask=used[:, None] & there[None, :],
    )


class _Tiles(NamedTuple):
    """How much a program takes: pairs, outputs, and inputs at once."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_FEW, _MANY = _Tiles(16, 64, 128, 4, 4), _Tiles(128, 128, 64, 8, 3)
_PAIRS_OF_FEW = 32
"""Pairs of an expert, on average, up to which matrices are what takes time to read."""


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """Returns how many blocks of ``rows`` pairs there are at most, however the pairs fall on the experts."""
    taken = min(pairs, experts)
    return taken + (pairs - taken) // rows


class _Matrices:
    """One matrix of each expert, read where it lies."""

    def __init__(self, matrices: tuple[Linear, ...]) -> None:
        first = matrices[0].weight
        self._held = matrices  # the kernel knows addresses alone
        self._addresses = torch.tensor([each.weight.data_ptr() for each in matrices], device=first.device)
        self._biases: Tensor | None = None
        if matrices[0].bias is not None:
            self._biases = torch.stack([each.bias for each in matrices if each.bias is not None])
        self._outputs, self._inputs = first.shape

    def multiply(self, rows: Tensor, order: Tensor, ends: Tensor, active: int, *, gather: bool) -> Tensor:
        """Returns ``[pairs, outputs]``.

        Args:
            rows: By token with ``gather``, and what is returned is sorted by expert; otherwise sorted, and what is
                returned lies token by token.
        """
        num_pairs, count = len(order), len(ends)
        tiles = _FEW if num_pairs <= _PAIRS_OF_FEW * count else _MANY
        out = rows.new_empty(num_pairs, self._outputs)
        grid = most_blocks(num_pairs, count, tiles.rows), triton.cdiv(self._outputs, tiles.columns)
        _product[grid](
            rows,
            order,
            ends,
            self._addresses,
            rows if self._biases is None else self._biases,
            out,
            self._inputs,
            self._outputs,
            count,
            ACTIVE=active,
            EXPERTS=triton.next_power_of_2(count),
            GATHER=gather,
            BIAS=self._biases is not None,
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            DEPTH=tiles.depth,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        return out


class GroupedExperts:
    """The experts of a layer, all of them here and none quantised."""

    def __init__(self, up: tuple[Linear, ...], down: tuple[Linear, ...]) -> None:
        self._up, self._down = _Matrices(up), _Matrices(down)
        self._numbers = torch.arange(len(up), device=up[0].weight.device)

    @classmethod
    def of(cls, weights: ExpertWeights) -> GroupedExperts | None:
        """Makes them of a layer's weights; None where some are quantised."""
        up, down = _floats(weights.up), _floats(weights.down)
        return None if up is None or down is None else cls(up, down)

    def mixed(self, normed: Tensor, chosen: Tensor, factors: Tensor, activated: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns what each token's experts make of it, added up: ``[T, hidden]``.

        Args:
            chosen, factors: As of ``route``.
            activated: Computes what lies between the two products of an expert.
        """
        num_tokens, active = chosen.shape
        by_expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(by_expert, self._numbers, right=True)
        inner = activated(self._up.multiply(normed, order, ends, active, gather=True))
        made = self._down.multiply(inner, order, ends, active, gather=False).view(num_tokens, active, -1)
        return torch.bmm(factors.to(made.dtype)[:, None], made)[:, 0]


def _floats(matrices: tuple[Matrix, ...]) -> tuple[Linear, ...] | None:
    found = tuple(each for each in matrices if isinstance(each, Linear))
    return found if len(found) == len(matrices) else None
