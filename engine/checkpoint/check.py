"""Whether a checkpoint's files hold what its configuration says, by their headers alone. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from farsight.engine.checkpoint.config_fields import CheckpointError, Shape
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.checkpoint.names import check_complete, known_name, tensor_shapes
from farsight.engine.checkpoint.quantization import StoredMatrix, stored_matrices
from farsight.engine.checkpoint.stored import FLOATS, StoredTensor, stored_tensors
from farsight.tokenization.gguf_file import GGUFFile, GGUFTensor, is_gguf, read_gguf

_LONGEST_BIAS = 1 << 22
"""Bytes of a bias that are read to see whether it is zero."""


def check_checkpoint(model: Path, config: DecoderConfig) -> None:
    """Reads the headers of all files.

    Args:
        model: A directory or a GGUF file.

    Raises:
        CheckpointError: A damaged file, or a missing, unexpected or odd tensor; names it.
        InvalidValueError: A file that leads out of the directory, or a damaged GGUF file.
    """
    if is_gguf(model):
        gguf_checkpoint(read_gguf(model), config)
    else:
        safetensors_checkpoint(model, config)


def gguf_checkpoint(file: GGUFFile, config: DecoderConfig) -> dict[str, GGUFTensor]:
    """The tensors of a file that carry something, by their names in the model.

    Raises:
        As ``check_checkpoint``.
    """
    targets = tensor_shapes(config)
    found = {name: _with_dimension(tensor, targets.get(name)) for name, tensor in file.tensors.items()}
    _check({name: tensor.shape for name, tensor in found.items()}, config)
    return {name: tensor for name, tensor in found.items() if name in targets}


def _with_dimension(tensor: GGUFTensor, shape: Shape | None) -> GGUFTensor:
    """Returns a tensor with the dimensions of size 1 that GGUF leaves out: of a matrix of one row, or a convolution."""
    if shape is None or [size for size in shape if size > 1] != [size for size in tensor.shape if size > 1]:
        return tensor
    return replace(tensor, shape=shape)


def safetensors_checkpoint(model_dir: Path, config: DecoderConfig) -> dict[str, StoredMatrix]:
    """The tensors of a directory's files that carry something, by their names in the model.

    Raises:
        As ``check_checkpoint``.
    """
    targets = tensor_shapes(config)
    stored = stored_tensors(model_dir)
    if config.quantization is not None and config.quantization.method == "gptq":
        stored = _without_empty_biases(stored, targets)
    found = stored_matrices(stored, config.quantization)
    names = {name: known_name(name, targets, config) for name in found}
    for name, known in names.items():
        plain = found[name].members["weight"] if found[name].is_plain else None
        if known is not None and plain is not None and plain.dtype not in FLOATS:
            raise _odd(name, f"{plain.dtype} {list(plain.shape)}", targets[known])
    _check({name: matrix.shape for name, matrix in found.items()}, config)
    return {known: found[name] for name, known in names.items() if known is not None}


def _without_empty_biases(stored: Mapping[str, StoredTensor], targets: Mapping[str, Shape]) -> dict[str, StoredTensor]:
    """Without the zeros that old versions of AutoGPTQ stored for layers that have no bias."""

    def is_empty(name: str) -> bool:
        base = name.removesuffix("bias")
        belongs = name.endswith(".bias") and name not in targets and base + "qweight" in stored
        return belongs and stored[name].end - stored[name].begin <= _LONGEST_BIAS and stored[name].is_zero()

    return {name: tensor for name, tensor in stored.items() if not is_empty(name)}


def _check(found: Mapping[str, Shape], config: DecoderConfig) -> None:
    targets = tensor_shapes(config)
    missing = set(targets)
    for name, shape in found.items():
        known = known_name(name, targets, config)
        if known is None:
            continue
        if shape != targets[known]:
            raise _odd(name, str(list(shape)), targets[known])
        missing.discard(known)
    check_complete(missing, targets)


def _odd(name: str, found: str, shape: Shape) -> CheckpointError:
    return CheckpointError(name, found, f"float32, bfloat16 or float16 of shape {list(shape)}")
