"""Safetensors checkpoints with quantised matrices, packed value by value as each format's own description says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours each four bits of an int32 hold, from the lowest."""

Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors that make up a matrix, by the ends of their names; and the matrix itself."""


def packed(values: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> Tensor:
    """Integers from 0 on, so many to an int32 along a dimension."""
    per_int = 32 // bits
    groups = values.long().movedim(dim, -1).unflatten(-1, (-1, per_int))
    words = sum(groups[..., order[place]] << (bits * place) for place in range(per_int))
    assert isinstance(words, Tensor)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


class Random:
    """Random integers, scales and zero points of a matrix."""

    def __init__(self, shape: tuple[int, int], bits: int, group: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        outputs, inputs = shape
        self.group = group
        self.values = torch.randint(0, 1 << bits, shape, generator=generator)
        self.zeros = torch.randint(1, 1 << bits, (outputs, inputs // group), generator=generator)
        spread = torch.rand((outputs, inputs // group), generator=generator)
        self.scales = ((spread + 0.5) * 0.3 / (1 << bits)).to(torch.float16)

    def dense(self, zeros: Tensor | int, order: Tensor | None = None) -> Tensor:
        """``scale * (value - zero)``, computed as exactly as float32 allows."""
        groups = torch.arange(self.values.shape[1]) // self.group if order is None else order
        own = zeros[:, groups] if isinstance(zeros, Tensor) else zeros
        return (self.values.double() - own) * self.scales.double()[:, groups]


def gptq(shape: tuple[int, int], seed: int, *, bits: int = 4, offset: int = 1, shuffled: bool = False) -> Packed:
    found = Random(shape, bits, GROUP, seed)
    order = torch.arange(shape[1]) // GROUP
    if shuffled:
        order = order[torch.randperm(shape[1], generator=torch.Generator().manual_seed(seed))]
    zeros = found.zeros - offset
    members = {
        "qweight": packed(found.values.t(), 0, tuple(range(32 // bits)), bits),
        "qzeros": packed(zeros.t(), 1, tuple(range(32 // bits)), bits),
        "scales": found.scales.t().contiguous(),
        "g_idx": order.to(torch.int32),
    }
    return members, found.dense(found.zeros, order)


def awq(shape: tuple[int, int], seed: int) -> Packed:
    found = Random(shape, 4, GROUP, seed)
    members = {
        "qweight": packed(found.values.t(), 1, AWQ_ORDER),
        "qzeros": packed(found.zeros.t(), 1, AWQ_ORDER),
        "scales": found.scales.t().contiguous(),
    }
    return members, found.dense(found.zeros)


def w4a16(shape: tuple[int, int], seed: int, *, symmetric: bool = True, bits: int = 4) -> Packed:
    found = Random(shape, bits, GROUP, seed)
    order = tuple(range(32 // bits))
    members = {
        "weight_packed": packed(found.values, 1, order, bits),
        "weight_scale": found.scales,
        "weight_shape": torch.tensor(shape),
    }
    if symmetric:
        return members, found.dense(1 << bits - 1)
    return members | {"weight_zero_point": packed(found.zeros, 0, order, bits)}, found.dense(found.zeros)


def w8a8(shape: tuple[int, int], seed: int) -> Packed:
    found = Random(shape, 8, shape[1], seed)
    members = {"weight": (found.values - 128).to(torch.int8), "weight_scale": found.scales}
    return members, found.dense(128)


def w8a8_one_scale(shape: tuple[int, int], seed: int) -> Packed:
    """With one scale for the whole matrix."""
    members, dense = w8a8(shape, seed)
    scale = members["weight_scale"][:1, 0]
    return members | {"weight_scale": scale}, dense / members["weight_scale"].double() * scale.double()


def fp8(shape: tuple[int, int], seed: int, *, block: int = 0, end: str = "weight_scale") -> Packed:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    sizes = [-(-size // block) for size in shape] if block else [shape[0], 1]
    scales = torch.rand(sizes, generator=generator) * 0.2 + 0.05
    whole = scales.repeat_interleave(block or 1, 0)[: shape[0]].repeat_interleave(block or shape[1], 1)[:, : shape[1]]
    return {"weight": values, end: scales}, values.double() * whole.double()


def _weights(kind: str, bits: int, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "symmetric": True, "dynamic": False, **fields}


def _compressed(stored: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


FORMATS: Mapping[str, tuple[dict[str, Any], Callable[[tuple[int, int], int], Packed], tuple[int, int] | None]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}, gptq, (4, GROUP)),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        lambda shape, seed: gptq(shape, seed, offset=0),
        (4, GROUP),
    ),
    "gptq 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP},
        lambda shape, seed: gptq(shape, seed, bits=8),
        (8, GROUP),
    ),
    "gptq desc_act": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        lambda shape, seed: gptq(shape, seed, shuffled=True),
        None,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq, (4, GROUP)),
    "w4a16": (_compressed("pack-quantized", _weights("int", 4, strategy="group")), w4a16, (4, GROUP)),
    "w4a16 asymmetric": (
        _compressed("pack-quantized", _weights("int", 4, symmetric=False)),
        lambda shape, seed: w4a16(shape, seed, symmetric=False),
        (4, GROUP),
    ),
    "w8a16": (
        _compressed("pack-quantized", _weights("int", 8)),
        lambda shape, seed: w4a16(shape, seed, bits=8),
        (8, GROUP),
    ),
    "w8a8": (_compressed("int-quantized", _weights("int", 8, strategy="channel")), w8a8, (8, 0)),
    "w8a8 one scale": (_compressed("int-quantized", _weights("int", 8, strategy="tensor")), w8a8_one_scale, (8, 0)),
    "fp8 channels": (_compressed("float-quantized", _weights("float", 8)), fp8, None),
    "fp8 blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 48]},
        lambda shape, seed: fp8(shape, seed, block=48, end="weight_scale_inv"),
        None,
    ),
}
"""By format: its ``quantization_config``, how a matrix is packed, bits and group of its record if it has one."""


def quantize_directory(model_dir: Path, out: Path, name: str) -> tuple[Path, Path]:
    """The model with random matrices in a format, and the same with those matrices in float32."""
    settings, pack, _ = FORMATS[name]
    stored, plain = shutil.copytree(model_dir, out / "stored"), shutil.copytree(model_dir, out / "plain")
    tensors = load_file(model_dir / "model.safetensors")
    quantized: dict[str, Tensor] = {}
    for number, (tensor_name, tensor) in enumerate(tensors.items()):
        if not tensor_name.endswith("proj.weight"):
            quantized[tensor_name] = tensor
            continue
        outputs, inputs = tensor.shape
        members, dense = pack((outputs, inputs), number)
        base = tensor_name.removesuffix("weight")
        quantized |= {base + end: member for end, member in members.items()}
        tensors[tensor_name] = dense.float()
    save_file(quantized, stored / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    config = json.loads((model_dir / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return stored, plain
