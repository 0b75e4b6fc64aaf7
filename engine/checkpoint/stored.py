"""What the headers of safetensors files say: each tensor with its type and shape. Knows no torch, reads no weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farsight.engine.checkpoint.config_fields import CheckpointError, Shape
from farsight.tokenization.model_dir import model_file, read_json_file

MAX_HEADER = 1 << 25
"""Longest header of a safetensors file, in bytes; the longest real ones have some 6 MB."""

_MAX_DIMENSIONS = 8

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
"""Bytes of a value, by the type's name in safetensors."""

FLOATS = ("F32", "BF16", "F16")
"""Types of weights that are not quantised."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        dtype: Its name in safetensors.
        begin: Its first byte, counted from the end of the header.
        end: The byte behind its last, counted likewise.
        header_bytes: Bytes before the first tensor of the file.
    """

    file: Path
    name: str
    dtype: str
    shape: Shape
    begin: int
    end: int
    header_bytes: int

    def is_zero(self) -> bool:
        """Whether all of its bytes are 0; they are read at once."""
        with self.file.open("rb") as file:
            file.seek(self.header_bytes + self.begin)
            return not any(file.read(self.end - self.begin))


def stored_tensors(model_dir: Path) -> dict[str, StoredTensor]:
    """Every tensor of ``model.safetensors``, or of the files that ``model.safetensors.index.json`` lists.

    Raises:
        CheckpointError: No such files, one that is damaged, or a name that occurs twice.
        InvalidValueError: A file that leads out of the directory.
    """
    found: dict[str, StoredTensor] = {}
    for path in _files(model_dir):
        for tensor in read_header(path):
            if tensor.name in found:
                raise CheckpointError(tensor.name, f"{found[tensor.name].file.name} and {path.name}", "one file")
            found[tensor.name] = tensor
    return found


def _files(model_dir: Path) -> list[Path]:
    index = model_file(model_dir, "model.safetensors.index.json")
    if index is None:
        path = model_file(model_dir, "model.safetensors")
        if path is None:
            expected = "a directory with model.safetensors or its index, or the path of a GGUF file"
            raise CheckpointError("model", str(model_dir), expected)
        return [path]
    raw = read_json_file(index)
    shards = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(shards, dict) or not all(_is_file_name(name) for name in shards.values()):
        raise CheckpointError(
            index.name, "another value", "a JSON object with a weight_map of names of files beside it"
        )
    return [_shard(model_dir, name) for name in sorted(set(shards.values()))]


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name


def _shard(model_dir: Path, name: str) -> Path:
    path = model_file(model_dir, name)
    if path is None:
        raise CheckpointError(name, "no such file", "the file that model.safetensors.index.json lists")
    return path


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of one file; they fill it without gaps.

    Raises:
        CheckpointError: Not such a file, or one that is damaged or lies about itself.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise _error(path, f"a header of {length} bytes in a file of {size} bytes")
            if length > MAX_HEADER:
                raise _error(path, f"a header of {length} bytes, at most {MAX_HEADER} are read")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(path.name, error.strerror, "a readable file") from error
    except (ValueError, RecursionError) as error:
        raise _error(path, f"a header that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _error(path, "a header that is no JSON object")
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    found = [_entry(path, 8 + length, name, entry) for name, entry in entries.items()]
    _check_places(path, found, size - 8 - length)
    return found


def _check_places(path: Path, tensors: list[StoredTensor], num_bytes: int) -> None:
    reached = 0
    for tensor in sorted(tensors, key=lambda each: (each.begin, each.end)):
        if tensor.begin != reached:
            raise _error(path, f"{tensor.name} at byte {tensor.begin}, where byte {reached} is next")
        reached = tensor.end
    if reached != num_bytes:
        raise _error(path, f"{num_bytes} bytes of tensors for {reached} that the header lists (cut off?)")


def _entry(path: Path, header_bytes: int, name: str, entry: Any) -> StoredTensor:
    fields: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = str(fields.get("dtype")), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if dtype not in ITEM_BYTES:
        raise _error(path, f"{name} of type {dtype[:20]!r}, known are {', '.join(ITEM_BYTES)}")
    if shape is None or offsets is None or len(offsets) != 2:
        raise _error(path, f"{name} of another shape, or at another place, than sizes and two offsets say")
    begin, end = offsets
    if math.prod(shape) * ITEM_BYTES[dtype] != end - begin:
        raise _error(path, f"{name}: {end - begin} bytes for {dtype} {list(shape)}")
    return StoredTensor(path, name, dtype, shape, begin, end, header_bytes)


def _sizes(value: Any) -> Shape | None:
    """A list of sizes as a tuple; None for anything else."""
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        return None
    return tuple(value) if all(type(each) is int and 0 <= each < 1 << 62 for each in value) else None


def _error(path: Path, found: str) -> CheckpointError:
    return CheckpointError(path.name, found, "a readable safetensors file; fetch it again")
