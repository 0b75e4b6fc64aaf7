"""How the matrices of a safetensors checkpoint are quantised: ``quantization_config``, and which tensors make a matrix.

Knows no torch: ``engine.checkpoint.repacking`` reads the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from farsight.engine.checkpoint.config_fields import CheckpointError, Shape, UnsupportedModelError
from farsight.engine.checkpoint.stored import FLOATS, StoredTensor

Method = Literal["gptq", "awq", "packed", "int8", "fp8", "mxfp4"]

MEMBERS: Mapping[Method, tuple[str, ...]] = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "packed": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    "int8": ("weight_scale", "weight_zero_point"),
    "fp8": ("weight_scale", "weight_scale_inv"),
    "mxfp4": ("blocks", "scales"),
}
"""Ends of the names of the tensors that make up a matrix, beside ``weight``; a matrix without any is stored plain."""

_IGNORED = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "activation_scale")
"""Ends of names of scales for activations: the engine computes its own, or none."""

MX_GROUP = 32
"""Neighbouring inputs that share a scale in MXFP4."""

_ELSEWHERE = "serve it with another server behind [[replica]], or an unquantised checkpoint of the model"


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the quantised matrices are stored.

    Attributes:
        method: ``packed`` and ``int8`` are those of compressed-tensors.
        bits: Bits of a weight.
        zero_offset: What is added to stored zero points: 1 in GPTQ's first format.
        has_zeros: Whether there are zero points other than the middle of the range.
        block: Outputs and inputs that share a scale, for ``fp8``; None if all inputs do.
    """

    method: Method
    bits: int
    zero_offset: int = 0
    has_zeros: bool = False
    block: tuple[int, int] | None = None

    @property
    def values_per_int(self) -> int:
        """Weights in an int32."""
        return 32 // self.bits


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A tensor as the model sees it.

    Attributes:
        members: The stored tensors that make it up, by the ends of their names; ``weight`` alone if it is plain.
    """

    shape: Shape
    members: Mapping[str, StoredTensor]

    @property
    def is_plain(self) -> bool:
        return len(self.members) == 1


def read_quantization(raw: Any) -> Quantization | None:
    """What ``quantization_config`` says; None if it is missing.

    Raises:
        UnsupportedModelError: A method, or a variant of one, that is not read.
    """
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise UnsupportedModelError("quantization_config", raw, "an object")
    method = raw.get("quant_method")
    readers = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8, "mxfp4": _mxfp4}
    reader = readers.get(str(method))
    if reader is None:
        expected = f"gptq, awq, compressed-tensors, fp8 or mxfp4: {_ELSEWHERE}"
        raise UnsupportedModelError("quantization_config.quant_method", method, expected)
    return reader(raw)


def _require(raw: Mapping[str, Any], name: str, allowed: tuple[Any, ...], default: Any, path: str = "") -> Any:
    value = raw.get(name, default)
    if not any(type(value) is type(each) and value == each for each in allowed):
        expected = f"{' or '.join(map(repr, allowed))}: {_ELSEWHERE}"
        raise UnsupportedModelError(f"quantization_config.{path}{name}", value, expected)
    return value


def _gptq(raw: Mapping[str, Any]) -> Quantization:
    bits = _require(raw, "bits", (4, 8), 4)
    stored = _require(raw, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return Quantization("gptq", bits, zero_offset=1 if stored == "gptq" else 0, has_zeros=True)


def _awq(raw: Mapping[str, Any]) -> Quantization:
    _require(raw, "version", ("gemm", "GEMM"), "gemm")
    _require(raw, "zero_point", (True,), True)
    return Quantization("awq", _require(raw, "bits", (4,), 4), has_zeros=True)


def _fp8(raw: Mapping[str, Any]) -> Quantization:
    _require(raw, "fmt", ("e4m3",), "e4m3")
    return Quantization("fp8", 8, block=_block("weight_block_size", raw.get("weight_block_size")))


def _mxfp4(raw: Mapping[str, Any]) -> Quantization:
    """Experts alone, as gpt-oss stores them; ``modules_to_not_convert`` says of the others what their tensors say."""
    return Quantization("mxfp4", 4)


def _block(name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(each) is int and each >= 1 for each in value):
        raise UnsupportedModelError(f"quantization_config.{name}", value, "two integers >= 1")
    return value[0], value[1]


def _compressed(raw: Mapping[str, Any]) -> Quantization:
    """One group of layers alike; activations may be quantised in any way, as the engine does so by itself or not."""
    _require(raw, "quantization_status", ("compressed",), "compressed")
    _require(raw, "transform_config", (None, {}), None)
    sparsity = raw.get("sparsity_config")
    _require(sparsity if isinstance(sparsity, dict) else {}, "format", ("dense",), "dense", "sparsity_config.")
    groups = raw.get("config_groups")
    found = list(groups.values()) if isinstance(groups, dict) else []
    if len(found) != 1 or not isinstance(found[0], dict) or not isinstance(found[0].get("weights"), dict):
        expected = f"one group with weights: {_ELSEWHERE}"
        raise UnsupportedModelError("quantization_config.config_groups", groups, expected)
    weights, path = found[0]["weights"], "config_groups.weights."
    stored = found[0].get("format") or raw.get("format")
    formats = ("int-quantized", "pack-quantized", "float-quantized", "naive-quantized")
    _require({"format": stored}, "format", formats, None)
    if _require(weights, "type", ("int", "float"), "int", path) == "float":
        block = _block(path + "block_structure", weights.get("block_structure"))
        return Quantization("fp8", _require(weights, "num_bits", (8,), 8, path), block=block)
    has_zeros = not _require(weights, "symmetric", (True, False), True, path)
    if stored == "pack-quantized":
        return Quantization("packed", _require(weights, "num_bits", (4, 8), 4, path), has_zeros=has_zeros)
    return Quantization("int8", _require(weights, "num_bits", (8,), 8, path), has_zeros=has_zeros)


def stored_matrices(stored: Mapping[str, StoredTensor], quantization: Quantization | None) -> dict[str, StoredMatrix]:
    """The tensors as the model sees them, by their names.

    Raises:
        CheckpointError: Tensors that do not fit together; names one.
    """
    if quantization is None:
        return {name: StoredMatrix(tensor.shape, {"weight": tensor}) for name, tensor in stored.items()}
    known = MEMBERS[quantization.method]
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        base, _, end = name.rpartition("_" if quantization.method == "mxfp4" else ".")
        if end in known or (end == "weight" and tensor.dtype not in FLOATS):
            found.setdefault(base if quantization.method == "mxfp4" else f"{base}.weight", {})[end] = tensor
        elif end not in _IGNORED:
            found.setdefault(name, {})["weight"] = tensor
    return {name: StoredMatrix(_shape(name, members, quantization), members) for name, members in found.items()}


def _shape(name: str, members: Mapping[str, StoredTensor], quantization: Quantization) -> Shape:
    """The matrix's shape, after a check that its members fit together."""
    if members.keys() == {"weight"} and members["weight"].dtype in FLOATS:
        return members["weight"].shape
    if quantization.method == "mxfp4":
        return _shape_of_blocks(name, members)
    for end in _required(quantization):
        if end not in members:
            raise CheckpointError(name.removesuffix("weight") + end, "nothing", "a tensor")
    shape = _outer_shape(name, members, quantization)
    for tensor, dtypes, allowed in _expected(members, shape, quantization):
        if tensor.dtype not in dtypes or tensor.shape not in allowed:
            expected = f"{' or '.join(dtypes)} of shape {' or '.join(str(list(each)) for each in allowed)}"
            raise CheckpointError(tensor.name, f"{tensor.dtype} {list(tensor.shape)}", expected)
    return shape


def _shape_of_blocks(name: str, members: Mapping[str, StoredTensor]) -> Shape:
    """``[experts, inputs, outputs]`` of matrices that lie as ``[experts, outputs, groups, bytes of a group]``."""
    for end in MEMBERS["mxfp4"]:
        if end not in members:
            raise CheckpointError(f"{name}_{end}", "nothing", "a tensor")
    blocks, scales = members["blocks"], members["scales"]
    if blocks.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[3] != MX_GROUP // 2 or 0 in blocks.shape:
        expected = f"U8 of shape [experts, outputs, groups, {MX_GROUP // 2}]"
        raise CheckpointError(blocks.name, f"{blocks.dtype} {list(blocks.shape)}", expected)
    if scales.dtype != "U8" or scales.shape != blocks.shape[:3]:
        raise CheckpointError(
            scales.name, f"{scales.dtype} {list(scales.shape)}", f"U8 of shape {list(blocks.shape[:3])}"
        )
    experts, outputs, groups = blocks.shape[:3]
    return experts, groups * MX_GROUP, outputs


def _required(quantization: Quantization) -> tuple[str, ...]:
    if quantization.method in ("gptq", "awq"):
        return ("qweight", "qzeros", "scales")
    if quantization.method == "packed":
        return ("weight_packed", "weight_scale", *(["weight_zero_point"] if quantization.has_zeros else []))
    if quantization.method == "int8":
        return ("weight", "weight_scale", *(["weight_zero_point"] if quantization.has_zeros else []))
    return ("weight",)


def _outer_shape(name: str, members: Mapping[str, StoredTensor], quantization: Quantization) -> Shape:
    main = members[_required(quantization)[0]]
    if len(main.shape) != 2 or 0 in main.shape:
        raise CheckpointError(main.name, f"shape {list(main.shape)}", "two dimensions")
    rows, columns = main.shape
    if quantization.method == "gptq":
        return columns, rows * quantization.values_per_int
    if quantization.method == "awq":
        return columns * quantization.values_per_int, rows
    if quantization.method == "packed":
        return rows, columns * quantization.values_per_int
    return rows, columns


def groups_of(members: Mapping[str, StoredTensor], quantization: Quantization) -> int:
    """Number of groups of neighbouring inputs that share a scale."""
    if quantization.method in ("gptq", "awq"):
        return members["scales"].shape[0] if members["scales"].shape else 0
    scale = members["weight_scale"].shape
    return scale[1] if len(scale) == 2 else 1


_Expected = tuple[StoredTensor, tuple[str, ...], tuple[Shape, ...]]


def _expected(members: Mapping[str, StoredTensor], shape: Shape, quantization: Quantization) -> Iterator[_Expected]:
    """Each member with its allowed types and shapes."""
    if quantization.method == "fp8":
        yield from _expected_fp8(members, shape, quantization.block)
        return
    outputs, inputs = shape
    groups, per_int = groups_of(members, quantization), quantization.values_per_int
    packs_outputs = quantization.method in ("gptq", "awq") or "weight_zero_point" in members
    if groups < 1 or inputs % groups or (packs_outputs and quantization.method != "int8" and outputs % per_int):
        name = members[_required(quantization)[0]].name
        raise CheckpointError(name, f"{list(shape)} in {groups} groups", "groups that divide the inputs")
    if quantization.method == "gptq":
        yield members["qweight"], ("I32",), ((inputs // per_int, outputs),)
    elif quantization.method == "awq":
        yield members["qweight"], ("I32",), ((inputs, outputs // per_int),)
    elif quantization.method == "packed":
        yield members["weight_packed"], ("I32",), ((outputs, inputs // per_int),)
    else:
        yield members["weight"], ("I8",), (shape,)
    if quantization.method in ("gptq", "awq"):
        yield members["qzeros"], ("I32",), ((groups, outputs // per_int),)
        yield members["scales"], FLOATS, ((groups, outputs),)
    else:
        whole = ((), (1,), (1, 1)) if groups == 1 else ()
        yield members["weight_scale"], FLOATS, (*_column((outputs, groups)), *whole)
    if "weight_zero_point" in members and quantization.method == "packed":
        yield members["weight_zero_point"], ("I32",), _column((outputs // per_int, groups))
    elif "weight_zero_point" in members:
        yield members["weight_zero_point"], ("I8",), _column((outputs, groups))
    for end in ("g_idx", "weight_g_idx"):
        if end in members:
            yield members[end], ("I32",), ((inputs,),)


def _column(shape: Shape) -> tuple[Shape, ...]:
    """The shape, and where it is one column that column without its second dimension."""
    return (shape, shape[:1]) if shape[1] == 1 else (shape,)


def _expected_fp8(
    members: Mapping[str, StoredTensor], shape: Shape, block: tuple[int, int] | None
) -> Iterator[_Expected]:
    """One scale for the whole matrix, one for each output, or one for each block."""
    yield members["weight"], ("F8_E4M3",), (shape,)
    scales = [members[end] for end in ("weight_scale", "weight_scale_inv") if end in members]
    if len(scales) != 1:
        raise CheckpointError(members["weight"].name, f"{len(scales)} tensors of scales", "one")
    allowed: tuple[Shape, ...] = ((), (1,), (1, 1), shape[:1], (shape[0], 1))
    if block is not None:
        allowed = ((-(-shape[0] // block[0]), -(-shape[1] // block[1])),)
    yield scales[0], FLOATS, allowed
