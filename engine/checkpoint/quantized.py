"""Weights in 8 or 4 bits: one record for what is rounded at the start and for what a checkpoint brings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farsight.core.errors import InvalidValueError

NIBBLE_CENTER = 8
"""The 4-bit value that stands for 0 where there are no minima."""


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """``x @ w.T + bias`` with weights ``w`` ``[n, k]`` in groups of neighbours along k.

    With ``q`` the stored integers and g = j // group:

    - 8 bits: ``w[i, j] = scales[i, g] * q[i, j] - minima[i, g]``; without minima ``scales[i, g] * q[i, j]``.
    - 4 bits: ``w[i, j] = scales[i, g] * q[i, j] - minima[i, g]``; without minima ``scales[i, g] * (q[i, j] - 8)``.

    A zero point z is a minimum of ``scale * (z - offset of q)``: exact in float32 for scales of 16 bits.

    Attributes:
        values: 8 bits: int8 ``[n, k]``. 4 bits: uint8 ``[n, k / 2]``, two neighbours in a byte, the first in its lower
            half, each 0 to 15.
        scales: float32 ``[n, k / group]``.
        minima: float32 ``[n, k / group]``; None if the values are symmetric.
        bits: 8 or 4.
        group: Neighbours that share a scale: a multiple of 4 that divides k; k itself is one scale for each output.
        bias: ``[n]``, any floating dtype; None without.

    Raises:
        InvalidValueError: Shapes or dtypes do not fit together; names the field.
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None
    bits: int
    group: int
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise InvalidValueError("bits", self.bits, "4 or 8")
        dtype = torch.int8 if self.bits == 8 else torch.uint8
        if self.values.dtype is not dtype or self.values.dim() != 2:
            found = f"{self.values.dtype} {list(self.values.shape)}"
            raise InvalidValueError("values", found, f"{dtype} in two dimensions for {self.bits} bits")
        if self.group < 4 or self.group % 4 or self.inputs % self.group:
            raise InvalidValueError("group", self.group, f"a multiple of 4 that divides {self.inputs}")
        shape = (self.outputs, self.inputs // self.group)
        if not self.values.is_contiguous():
            raise InvalidValueError("values", f"strides {self.values.stride()}", "a contiguous tensor")
        for name, tensor in (("scales", self.scales), ("minima", self.minima)):
            if tensor is not None and not tensor.is_contiguous():
                raise InvalidValueError(name, f"strides {tensor.stride()}", "a contiguous tensor")
            if tensor is not None and (tensor.shape != shape or tensor.dtype is not torch.float32):
                found = f"{tensor.dtype} {list(tensor.shape)}"
                raise InvalidValueError(name, found, f"torch.float32 {list(shape)}")

    def split(self, count: int, order: Tensor | None = None) -> list[QuantizedLinear]:
        """``count`` matrices that lie one below the other, none with a bias.

        Args:
            order: Which of its outputs each output of a part is; None where they lie in order.
        """

        def parts(tensor: Tensor) -> list[Tensor]:
            cut = torch.split(tensor, self.outputs // count)
            return list(cut) if order is None else [part[order] for part in cut]

        minima = [None] * count if self.minima is None else parts(self.minima)
        return [
            QuantizedLinear(values, scales, least, self.bits, self.group)
            for values, scales, least in zip(parts(self.values), parts(self.scales), minima, strict=True)
        ]

    @property
    def outputs(self) -> int:
        """n."""
        return len(self.values)

    @property
    def inputs(self) -> int:
        """k."""
        return self.values.shape[1] * (1 if self.bits == 8 else 2)

    @property
    def nbytes(self) -> int:
        """Memory of values, scales and minima."""
        return self.values.nbytes + self.scales.nbytes + (0 if self.minima is None else self.minima.nbytes)

    def integers(self) -> Tensor:
        """The stored integers, ``[n, k]``: int8 for 8 bits, uint8 from 0 to 15 for 4."""
        if self.bits == 8:
            return self.values
        return torch.stack((self.values & 15, self.values >> 4), -1).flatten(1)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weights, ``[n, k]``: computed in float32, then rounded to ``dtype``."""
        steps = self.integers().float().view(*self.scales.shape, self.group)
        if self.minima is None and self.bits == 4:
            steps.sub_(NIBBLE_CENTER)
        weights = steps.mul_(self.scales[..., None])
        if self.minima is not None:
            weights.sub_(self.minima[..., None])
        return weights.view(self.outputs, self.inputs).to(dtype)


def pack_nibbles(integers: Tensor) -> Tensor:
    """``values`` of 4 bits: integers 0 to 15 ``[n, k]``, k even, as uint8 ``[n, k / 2]``."""
    halves = integers.to(torch.uint8)
    return halves[:, ::2] | halves[:, 1::2] << 4


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """A fused layer whose outputs come from parts in several formats, one below the other.

    ``q_proj``, ``k_proj`` and ``v_proj`` of one layer may be quantised differently in a checkpoint.
    """

    parts: tuple[QuantizedLinear, ...]

    @property
    def outputs(self) -> int:
        """Outputs of all parts."""
        return sum(part.outputs for part in self.parts)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weights of all parts, ``[n, k]``."""
        return torch.cat([part.dense(dtype) for part in self.parts])

    @property
    def bias(self) -> Tensor | None:
        """The biases of all parts; None if no part has one."""
        if all(part.bias is None for part in self.parts):
            return None
        like = next(part.bias for part in self.parts if part.bias is not None)
        return torch.cat([like.new_zeros(part.outputs) if part.bias is None else part.bias for part in self.parts])


def join_records(parts: Sequence[QuantizedLinear], bias: Tensor | None) -> QuantizedLinear | JoinedLinear:
    """One layer whose outputs are those of the parts, one below the other; neighbours of one format become one part.

    Args:
        bias: The biases of all outputs together.
    """
    joined: list[QuantizedLinear] = []
    for part in parts:
        if joined and _alike(joined[-1], part):
            joined[-1] = _stacked(joined[-1], part)
        else:
            joined.append(part)
    if bias is not None:
        biases = torch.split(bias, [part.outputs for part in joined])
        joined = [replace(part, bias=own) for part, own in zip(joined, biases, strict=True)]
    return joined[0] if len(joined) == 1 else JoinedLinear(tuple(joined))


def gather_records(parts: Iterable[QuantizedLinear], outputs: int) -> QuantizedLinear:
    """One record of rows that come in parts of one format, at least one; it takes the memory of one part besides."""
    whole: QuantizedLinear | None = None
    first = 0
    for part in parts:
        if whole is None:
            minima = None if part.minima is None else part.minima.new_empty(outputs, part.minima.shape[1])
            values = part.values.new_empty(outputs, part.values.shape[1])
            scales = part.scales.new_empty(outputs, part.scales.shape[1])
            whole = QuantizedLinear(values, scales, minima, part.bits, part.group)
        rows = slice(first, first + part.outputs)
        whole.values[rows], whole.scales[rows] = part.values, part.scales
        if whole.minima is not None and part.minima is not None:
            whole.minima[rows] = part.minima
        first += part.outputs
    assert whole is not None and first == outputs, "a matrix has rows"
    return whole


def _alike(a: QuantizedLinear, b: QuantizedLinear) -> bool:
    return (a.bits, a.group, a.minima is None) == (b.bits, b.group, b.minima is None)


def _stacked(a: QuantizedLinear, b: QuantizedLinear) -> QuantizedLinear:
    minima = None if a.minima is None or b.minima is None else torch.cat([a.minima, b.minima])
    return QuantizedLinear(torch.cat([a.values, b.values]), torch.cat([a.scales, b.scales]), minima, a.bits, a.group)
