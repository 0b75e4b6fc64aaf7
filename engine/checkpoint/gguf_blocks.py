"""Blocks of GGUF tensors as the engine's own record of a quantised matrix, integer for integer.

The layouts are those of ``ggml-quants``; each function takes uint8 ``[n, blocks, bytes of a block]``. Types that have
no record are turned into floats by the ``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine.checkpoint.quantized import QuantizedLinear, pack_nibbles


def has_record(kind: str) -> bool:
    """Whether a type of blocks can be held as a record."""
    return kind in _READERS


def gguf_record(kind: str, rows: Tensor) -> QuantizedLinear:
    """The record of a matrix.

    Args:
        kind: A type that has a record.
        rows: uint8 ``[n, bytes of a row]``.
    """
    reader, num_bytes = _READERS[kind]
    return reader(rows.view(len(rows), -1, num_bytes))


def _q8_0(blocks: Tensor) -> QuantizedLinear:
    return QuantizedLinear(blocks[..., 2:].view(torch.int8).flatten(1), _halves(blocks, 0), None, 8, 32)


def _q4_0(blocks: Tensor) -> QuantizedLinear:
    return QuantizedLinear(pack_nibbles(_nibbles(blocks[..., 2:])), _halves(blocks, 0), None, 4, 32)


def _q4_1(blocks: Tensor) -> QuantizedLinear:
    return QuantizedLinear(pack_nibbles(_nibbles(blocks[..., 4:])), _halves(blocks, 0), -_halves(blocks, 2), 4, 32)


def _q5_0(blocks: Tensor) -> QuantizedLinear:
    values = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return QuantizedLinear(values.view(torch.int8) - 16, _halves(blocks, 0), None, 8, 32)


def _q5_1(blocks: Tensor) -> QuantizedLinear:
    values = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return QuantizedLinear(values.view(torch.int8), _halves(blocks, 0), -_halves(blocks, 2), 8, 32)


def _q4_k(blocks: Tensor) -> QuantizedLinear:
    scales, minima = _k_scales(blocks)
    return QuantizedLinear(pack_nibbles(_k_nibbles(blocks[..., 16:])), scales, minima, 4, 32)


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


def _halves(blocks: Tensor, begin: int) -> Tensor:
    """The float16 at a byte of each block, as float32 ``[n, blocks]``."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(octets: Tensor) -> Tensor:
    """``[n, k]``: of each 16 bytes first all lower halves, then all upper ones."""
    return torch.cat((octets & 15, octets >> 4), -1).flatten(1)


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


_READERS: Mapping[str, tuple[Callable[[Tensor], QuantizedLinear], int]] = {
    "Q8_0": (_q8_0, 34),
    "Q4_0": (_q4_0, 18),
    "Q4_1": (_q4_1, 20),
    "Q5_0": (_q5_0, 22),
    "Q5_1": (_q5_1, 24),
    "Q4_K": (_q4_k, 144),
    "Q5_K": (_q5_k, 176),
    "Q6_K": (_q6_k, 210),
}
"""By type: how it is read, and the bytes of a block."""
