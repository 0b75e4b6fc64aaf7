"""Where weights come from: one way to read the tensors of a safetensors directory and of a GGUF file.

A tensor is read from the mapped file straight into its place, in parts of some rows where it has to be turned into
floats, so that a load needs little more memory than the weights take.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from farsight.engine.checkpoint.check import gguf_checkpoint, safetensors_checkpoint
from farsight.engine.checkpoint.config_fields import CheckpointError
from farsight.engine.checkpoint.gguf_model import gguf_family
from farsight.engine.checkpoint.layers import turned_order
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.checkpoint.quantization import StoredMatrix
from farsight.engine.checkpoint.quantized import QuantizedLinear, gather_records
from farsight.engine.checkpoint.repacking import float_rows, gguf_record, has_record, record_rows, repacked
from farsight.tokenization.gguf_file import GGUFTensor, is_gguf, read_gguf

SMALL = 1 << 22
"""Values up to which one thread computes alone."""


@contextmanager
def threads_for(num_values: int) -> Iterator[None]:
    """One thread for an operation on a few values, all of them otherwise.

    An operation that threads share ends with the last of them, and on a busy machine that one waits for a time slice. A
    mixture of experts has thousands of small tensors: with 4 threads on 4 busy cores a model of 111 million parameters
    was not loaded within a minute; with one thread it takes a second.
    """
    threads = torch.get_num_threads()
    if threads == 1 or num_values > SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAPPED_BYTES = 1 << 25
"""Bytes that are read of safetensors files before they are closed and opened again."""

_CHUNK_VALUES = 1 << 22
"""Values of a GGUF tensor that are read at a time."""


class TensorSource(Protocol):
    """The tensors of a checkpoint, by their names in the model. Their shapes have been checked."""

    def names(self) -> Iterator[str]:
        """All of them, in the order in which they are best read."""
        ...

    def num_values(self, name: str) -> int:
        """How many values a tensor has."""
        ...

    def fill(self, name: str, target: Tensor) -> None:
        """Copies a tensor into another of its shape."""
        ...

    def rows(self, name: str) -> Any:
        """A tensor of floats, or what is sliced like one."""
        ...

    def record(self, name: str) -> QuantizedLinear | None:
        """A quantised matrix as it is stored; None where it is not, or not in a way that the record has."""
        ...


def open_checkpoint(model: Path, config: DecoderConfig, device: str = "cpu") -> TensorSource:
    """Checks a checkpoint and opens it.

    Args:
        model: A directory or a GGUF file.
        device: Where plain tensors are read to; quantised ones are always read to the CPU.

    Raises:
        CheckpointError, InvalidValueError: As ``check_checkpoint``.
    """
    if is_gguf(model):
        header = read_gguf(model)
        orders: dict[str, Tensor] = {}
        if gguf_family(header).neighbours and config.rotary is not None:
            orders["attn_q"] = turned_order(config, config.num_attention_heads)
            orders["attn_k"] = turned_order(config, config.num_key_value_heads)
        return GGUFSource(model, gguf_checkpoint(header, config), orders)
    return _SafetensorsSource(model, config, device)


class _SafetensorsSource:
    """The files of a directory; one is open at a time, or two where the members of a matrix are apart."""

    def __init__(self, model_dir: Path, config: DecoderConfig, device: str) -> None:
        self._matrices = safetensors_checkpoint(model_dir, config)
        self._quantization = config.quantization
        self._device = device
        self._open: dict[tuple[Path, str], Any] = {}
        self._mapped_bytes = 0

    def names(self) -> Iterator[str]:
        def place(name: str) -> list[str]:
            return sorted({member.file.name for member in self._matrices[name].members.values()})

        return iter(sorted(self._matrices, key=place))

    def num_values(self, name: str) -> int:
        return math.prod(self._matrices[name].shape)

    def fill(self, name: str, target: Tensor) -> None:
        matrix = self._matrices[name]
        if matrix.is_plain:
            target.copy_(self._plain(matrix)[:])
            self._release(target.nbytes)
            return
        members = self._members(matrix)
        assert self._quantization is not None, "matrices of several tensors are quantised"
        record = repacked(members, self._quantization)
        if record is not None and target.dim() == 3:  # [experts, inputs, outputs]; the record's rows are outputs
            for each, part in zip(target, record.split(len(target)), strict=True):
                each.t().copy_(part.dense(target.dtype))
            self._release(target.nbytes)
            return
        parts = float_rows(members, self._quantization) if record is None else record_rows(record, target.dtype)
        fill_rows(target, parts)
        self._release(target.nbytes)

    def rows(self, name: str) -> Any:
        matrix = self._matrices[name]
        if matrix.is_plain:
            return self._plain(matrix)
        whole = torch.empty(matrix.shape, dtype=torch.float32)
        self.fill(name, whole)
        return whole

    def record(self, name: str) -> QuantizedLinear | None:
        matrix = self._matrices[name]
        if matrix.is_plain or self._quantization is None:
            return None
        with threads_for(math.prod(matrix.shape)):
            record = repacked(self._members(matrix), self._quantization)
        self._release(0 if record is None else record.nbytes)
        return record

    def _plain(self, matrix: StoredMatrix) -> Any:
        stored = matrix.members["weight"]
        return self._file(stored.file, self._device).get_slice(stored.name)

    def _members(self, matrix: StoredMatrix) -> dict[str, Tensor]:
        return {end: self._file(each.file, "cpu").get_tensor(each.name) for end, each in matrix.members.items()}

    def _release(self, num_bytes: int) -> None:
        """Closes the files from time to time: what was read of a mapped file counts as memory of this process."""
        self._mapped_bytes += num_bytes
        if self._mapped_bytes > _MAPPED_BYTES:
            self._mapped_bytes = 0
            self._open.clear()

    def _file(self, path: Path, device: str) -> Any:
        key = (path, device)
        if key not in self._open:
            while len(self._open) > 1:
                del self._open[next(iter(self._open))]
            try:
                self._open[key] = safe_open(path, framework="pt", device=device)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(path.name, str(error), "a readable safetensors file") from error
        return self._open[key]


class GGUFSource:
    """One mapped file.

    Args:
        tensors: By their names in the model.
        orders: By the last part of a name: which stored row each row of such a tensor is.
    """

    def __init__(self, path: Path, tensors: Mapping[str, GGUFTensor], orders: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._orders = orders
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def names(self) -> Iterator[str]:
        return iter(sorted(self._tensors, key=lambda name: self._tensors[name].begin))

    def num_values(self, name: str) -> int:
        return math.prod(self._tensors[name].shape)

    def fill(self, name: str, target: Tensor) -> None:
        fill_rows(target, self._float_rows(name, target.dtype))
        self._release(self._tensors[name])

    def rows(self, name: str) -> Tensor:
        whole = torch.empty(self._tensors[name].shape, dtype=torch.float32)
        self.fill(name, whole)
        return whole

    def record(self, name: str) -> QuantizedLinear | None:
        tensor = self._tensors[name]
        if not has_record(tensor.kind) or len(tensor.shape) < 2:
            return None
        rows, step = self._stored_rows(name), _rows_at_once(tensor)
        parts = (gguf_record(tensor.kind, rows[first : first + step]) for first in range(0, len(rows), step))
        with threads_for(math.prod(tensor.shape)):
            record = gather_records(parts, len(rows))
        self._release(tensor)
        return record

    def _float_rows(self, name: str, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        kind, rows, step = self._tensors[name].kind, self._stored_rows(name), _rows_at_once(self._tensors[name])
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            if kind in _FLOATS:
                yield first, part.contiguous().view(_FLOATS[kind])
            elif has_record(kind):
                yield first, gguf_record(kind, part).dense(dtype)
            else:
                yield first, _by_gguf(kind, part)

    def _stored_rows(self, name: str) -> Tensor:
        """The bytes of each row, the rows in the model's order: uint8 ``[n, bytes]``."""
        tensor = self._tensors[name]
        rows = math.prod(tensor.shape[:-1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the file cannot be written to, and nothing writes
            flat = torch.frombuffer(self._data, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.begin)
        stored = flat.view(rows, -1)
        order = self._orders.get(name.split(".")[-2])
        if order is None:
            return stored
        if len(tensor.shape) == 1:
            return flat.view(tensor.shape[0], -1)[order].view(1, -1)
        return stored[order]

    def _release(self, tensor: GGUFTensor) -> None:
        """Lets the mapped pages go: they would count as memory of this process until the whole file is read."""
        begin = -(-tensor.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.begin + tensor.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin and hasattr(self._data, "madvise"):
            self._data.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _rows_at_once(tensor: GGUFTensor) -> int:
    return max(1, _CHUNK_VALUES // tensor.shape[-1])


def fill_rows(target: Tensor, parts: Iterator[tuple[int, Tensor]]) -> None:
    """Copies rows into a tensor; each part comes with the number of its first row."""
    if target.dim() == 3:
        _fill_experts(target, parts)
        return
    whole = target if target.dim() > 1 else target.view(1, -1)
    for first, part in parts:
        whole[first : first + len(part)].copy_(part)


def _fill_experts(target: Tensor, parts: Iterator[tuple[int, Tensor]]) -> None:
    """The same for ``[experts, outputs, inputs]``, of which parts hold the rows of one expert after the other."""
    outputs = target.shape[1]
    for first, part in parts:
        done = 0
        while done < len(part):
            expert, row = divmod(first + done, outputs)
            count = min(outputs - row, len(part) - done)
            target[expert, row : row + count].copy_(part[done : done + count])
            done += count


def _by_gguf(kind: str, rows: Tensor) -> Tensor:
    from gguf.constants import GGMLQuantizationType  # only here: few files have such types, and the import costs time
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[kind]))
