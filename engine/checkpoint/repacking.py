"""Quantised matrices of safetensors checkpoints and GGUF files as the engine's own record, integer for integer.

Without a record for a type they become floats. The layouts of GGUF blocks are those of ``ggml-quants``; its readers
take uint8 ``[n, blocks, bytes of a block]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from farsight.engine.checkpoint.config_fields import CheckpointError
from farsight.engine.checkpoint.quantization import MX_GROUP, Quantization
from farsight.engine.checkpoint.quantized import QuantizedLinear, gather_records, pack_nibbles

_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where each of eight neighbours stands in an int32 of AWQ."""

_ROWS = 1024
"""Rows that are turned into floats at a time, so that a load takes little more memory than the weights."""

_HALVES_OF_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each four bits of MXFP4 (OCP Microscaling Formats 1.0, E2M1)."""

_MULTIPLE = 4
"""The record's groups are multiples of it."""


def repacked(members: Mapping[str, Tensor], quantization: Quantization) -> QuantizedLinear | None:
    """The matrix in the engine's record, integer for integer; None if the record cannot hold it.

    Args:
        members: The tensors that make it up, by the ends of their names.
    """
    method = quantization.method
    if method == "fp8":
        return None
    if method == "mxfp4":
        blocks = members["blocks"].flatten(0, 1)
        return gather_records(_mx_records(blocks, members["scales"].flatten(0, 1)), len(blocks))
    integers, scales, zeros = _parts(members, quantization)
    groups = scales.shape[1]
    group = integers.shape[1] // groups
    if group % _MULTIPLE or _order(members, groups, group) is not None:
        return None
    middle = 1 << (quantization.bits - 1)
    if zeros is None or bool((zeros == middle).all()):
        minima = None
    else:
        minima = scales * (zeros if quantization.bits == 4 else zeros - middle)
    if quantization.bits == 4:
        return QuantizedLinear(pack_nibbles(integers), scales, minima, 4, group)
    values = (integers.to(torch.int16) - middle).to(torch.int8)
    return QuantizedLinear(values, scales, minima, 8, group)


def _mx_records(blocks: Tensor, scales: Tensor) -> Iterator[QuantizedLinear]:
    """Some rows each. 8 bits hold twice any value of four bits, and so the record is the same numbers.

    Args:
        blocks: uint8 ``[n, groups, 16]``, two neighbours in a byte, the first in its lower half.
        scales: uint8 ``[n, groups]``, exponents of 2 plus 127.
    """
    for first in range(0, len(blocks), _ROWS):
        octets = blocks[first : first + _ROWS].flatten(1)
        yield _mx_record(torch.stack((octets & 15, octets >> 4), -1).flatten(1), scales[first : first + _ROWS])


def _mx_record(nibbles: Tensor, scales: Tensor) -> QuantizedLinear:
    """Returns the record of values ``[n, k]`` of four bits and of their groups' exponents ``[n, k / 32]``."""
    values = torch.tensor(_HALVES_OF_FP4, dtype=torch.int8)[nibbles.int()]
    exponents = scales.int() - 128  # of half a value
    return QuantizedLinear(values, torch.ldexp(torch.ones(exponents.shape), exponents), None, 8, MX_GROUP)


def float_rows(members: Mapping[str, Tensor], quantization: Quantization) -> Iterator[tuple[int, Tensor]]:
    """A matrix that has no record: numbers of first rows, and rows in float32."""
    if quantization.method == "fp8":
        yield from _fp8_rows(members, quantization)
        return
    integers, scales, zeros = _parts(members, quantization)
    groups = scales.shape[1]
    order = _order(members, groups, integers.shape[1] // groups)
    if order is None:
        order = torch.arange(integers.shape[1]) // (integers.shape[1] // groups)
    middle = float(1 << (quantization.bits - 1))
    for first in range(0, len(integers), _ROWS):
        rows = slice(first, first + _ROWS)
        steps = integers[rows].float() - (middle if zeros is None else zeros[rows][:, order])
        yield first, steps * scales[rows][:, order]


def record_rows(record: QuantizedLinear, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Numbers of first rows, and rows of a record as floats."""
    for first in range(0, record.outputs, _ROWS):
        rows = slice(first, first + _ROWS)
        minima = None if record.minima is None else record.minima[rows]
        part = QuantizedLinear(record.values[rows], record.scales[rows], minima, record.bits, record.group)
        yield first, part.dense(dtype)


def _parts(members: Mapping[str, Tensor], quantization: Quantization) -> tuple[Tensor, Tensor, Tensor | None]:
    """Stored integers from 0 on ``[n, k]``, scales and zero points ``[n, groups]``, both float32."""
    return _READERS[quantization.method](members, quantization)


def _gptq(members: Mapping[str, Tensor], quantization: Quantization) -> tuple[Tensor, Tensor, Tensor | None]:
    integers = _unpacked(members["qweight"].t(), quantization.bits)
    zeros = _unpacked(members["qzeros"], quantization.bits).t().float() + quantization.zero_offset
    return integers, members["scales"].t().float().contiguous(), zeros.contiguous()


def _awq(members: Mapping[str, Tensor], quantization: Quantization) -> tuple[Tensor, Tensor, Tensor | None]:
    integers, zeros = (
        _unpacked(members[name], 4).view(len(members[name]), -1, 8)[..., _AWQ_PLACES].flatten(1)
        for name in ("qweight", "qzeros")
    )
    return integers.t().contiguous(), members["scales"].t().float().contiguous(), zeros.t().float().contiguous()


def _packed(members: Mapping[str, Tensor], quantization: Quantization) -> tuple[Tensor, Tensor, Tensor | None]:
    integers = _unpacked(members["weight_packed"], quantization.bits)
    scales = _scales(members, len(integers))
    stored = members.get("weight_zero_point")
    if stored is None:
        return integers, scales, None
    zeros = _unpacked(stored.view(len(stored), -1).t(), quantization.bits).t()
    return integers, scales, zeros.float().contiguous()


def _int8(members: Mapping[str, Tensor], quantization: Quantization) -> tuple[Tensor, Tensor, Tensor | None]:
    values = members["weight"]
    scales = _scales(members, len(values))
    zeros = members.get("weight_zero_point")
    integers = (values.to(torch.int16) + 128).to(torch.uint8)
    return integers, scales, None if zeros is None else zeros.float().view(scales.shape) + 128


def _scales(members: Mapping[str, Tensor], outputs: int) -> Tensor:
    """``[n, groups]`` of compressed-tensors; a single scale is that of every output."""
    scales = members["weight_scale"].float()
    return scales.reshape(1, 1).repeat(outputs, 1) if scales.numel() == 1 else scales.view(outputs, -1)


_READERS: Mapping[str, Callable[[Mapping[str, Tensor], Quantization], tuple[Tensor, Tensor, Tensor | None]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "packed": _packed,
    "int8": _int8,
}


def _unpacked(ints: Tensor, bits: int) -> Tensor:
    """The integers in int32 values, the lowest bits first, along the second dimension: uint8."""
    octets = ints.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def _order(members: Mapping[str, Tensor], groups: int, group: int) -> Tensor | None:
    """The group of each input where groups are not neighbours (GPTQ's ``desc_act``); None where they are.

    Raises:
        CheckpointError: A group that does not exist.
    """
    found = members.get("g_idx", members.get("weight_g_idx"))
    if found is None or torch.equal(found, torch.arange(len(found), dtype=found.dtype) // group):
        return None
    if not bool(((found >= 0) & (found < groups)).all()):
        raise CheckpointError("g_idx", f"{int(found.min())} to {int(found.max())}", f"groups from 0 to {groups - 1}")
    return found.long()


def _fp8_rows(members: Mapping[str, Tensor], quantization: Quantization) -> Iterator[tuple[int, Tensor]]:
    weight = members["weight"]
    scales = (members["weight_scale"] if "weight_scale" in members else members["weight_scale_inv"]).float()
    if quantization.block is None:
        scales = scales.reshape(-1, 1).expand(len(weight), 1)
    for first in range(0, len(weight), _ROWS):
        rows = torch.arange(first, min(first + _ROWS, len(weight)))
        part = weight[first : first + _ROWS].float()
        if quantization.block is None:
            yield first, part * scales[rows]
        else:
            columns = torch.arange(weight.shape[1]) // quantization.block[1]
            yield first, part * scales[rows // quantization.block[0]][:, columns]


def has_record(kind: str) -> bool:
    """Whether a type of blocks can be held as a record."""
    return kind in _BLOCK_READERS


def gguf_record(kind: str, rows: Tensor) -> QuantizedLinear:
    """The record of a matrix.

    Args:
        kind: A type that has a record.
        rows: uint8 ``[n, bytes of a row]``.
    """
    reader, num_bytes = _BLOCK_READERS[kind]
    return reader(rows.view(len(rows), -1, num_bytes))


def _q8_0(blocks: Tensor) -> QuantizedLinear:
    return QuantizedLinear(blocks[..., 2:].view(torch.int8).flatten(1), _halves(blocks, 0), None, 8, 32)


def _q4_0(blocks: Tensor) -> QuantizedLinear:
    return QuantizedLinear(_packed_nibbles(blocks[..., 2:]), _halves(blocks, 0), None, 4, 32)


def _q4_1(blocks: Tensor) -> QuantizedLinear:
    return QuantizedLinear(_packed_nibbles(blocks[..., 4:]), _halves(blocks, 0), -_halves(blocks, 2), 4, 32)


def _q5_0(blocks: Tensor) -> QuantizedLinear:
    values = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return QuantizedLinear(values.view(torch.int8) - 16, _halves(blocks, 0), None, 8, 32)


def _q5_1(blocks: Tensor) -> QuantizedLinear:
    values = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return QuantizedLinear(values.view(torch.int8), _halves(blocks, 0), -_halves(blocks, 2), 8, 32)


def _q4_k(blocks: Tensor) -> QuantizedLinear:
    scales, minima = _k_scales(blocks)
    return QuantizedLinear(_packed_nibbles(_split(blocks[..., 16:], 32)), scales, minima, 4, 32)


def _q5_k(blocks: Tensor) -> QuantizedLinear:
    scales, minima = _k_scales(blocks)
    bits = torch.stack([blocks[..., 16:48] >> sub & 1 for sub in range(8)], -2).flatten(1)
    values = _k_nibbles(blocks[..., 48:]) | bits << 4
    return QuantizedLinear(values.view(torch.int8), scales, minima, 8, 32)


def _q6_k(blocks: Tensor) -> QuantizedLinear:
    """Halves of 128 values; a low byte has values 64 apart, a high byte two bits of each of four values 32 apart."""
    low, high = _split(blocks[..., :128], 64), _split(blocks[..., 128:192], 32)
    nibbles = torch.cat((low & 15, low >> 4), -1)
    pairs = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    values = (nibbles | pairs << 4).flatten(1).view(torch.int8) - 32
    scales = blocks[..., 192:208].view(torch.int8).float() * _halves(blocks, 208)[..., None]
    return QuantizedLinear(values, scales.flatten(1), None, 8, 16)


def _mxfp4(blocks: Tensor) -> QuantizedLinear:
    return _mx_record(_nibbles(blocks[..., 1:]), blocks[..., 0])


def _halves(blocks: Tensor, begin: int) -> Tensor:
    """The float16 at a byte of each block, as float32 ``[n, blocks]``."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(octets: Tensor) -> Tensor:
    """``[n, k]``: of each 16 bytes first all lower halves, then all upper ones."""
    return torch.cat((octets & 15, octets >> 4), -1).flatten(1)


def _packed_nibbles(octets: Tensor) -> Tensor:
    """``pack_nibbles`` of ``_nibbles``, two bytes at a time: a byte for each value would take three times as long."""
    pairs = octets.contiguous().view(torch.int16)
    lower = pairs & 0x0F | pairs >> 4 & 0xF0
    upper = pairs >> 4 & 0x0F | pairs >> 8 & 0xF0
    return torch.cat((lower, upper), -1).to(torch.uint8).flatten(1)


def _k_nibbles(octets: Tensor) -> Tensor:
    """The same of each 32 bytes."""
    return _nibbles(_split(octets, 32))


def _split(octets: Tensor, size: int) -> Tensor:
    """The last dimension in parts of a size."""
    return octets.reshape(*octets.shape[:-1], -1, size)


def _fifth_bits(octets: Tensor) -> Tensor:
    """32 bits of a block as 0 or 16 each, ``[n, k]``."""
    return (torch.stack([octets >> bit & 1 for bit in range(8)], -1) << 4).flatten(1)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of eight groups of 32: six bits each, in twelve bytes, times the block's own two factors."""
    first, second, third = _split(blocks[..., 4:16], 4).unbind(-2)
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), -1).float()
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), -1).float()
    scales = scales * _halves(blocks, 0)[..., None]
    return scales.flatten(1), (minima * _halves(blocks, 2)[..., None]).flatten(1)


_BLOCK_READERS: Mapping[str, tuple[Callable[[Tensor], QuantizedLinear], int]] = {
    "Q8_0": (_q8_0, 34),
    "Q4_0": (_q4_0, 18),
    "Q4_1": (_q4_1, 20),
    "Q5_0": (_q5_0, 22),
    "Q5_1": (_q5_1, 24),
    "Q4_K": (_q4_k, 144),
    "Q5_K": (_q5_k, 176),
    "Q6_K": (_q6_k, 210),
    "MXFP4": (_mxfp4, 17),
}
"""By type: how it is read, and the bytes of a block."""
