"""Matrices of the compiled step in every format, multiplied alone, beside what the machine can do."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from farsight.engine import native
from farsight.engine.checkpoint.quantized import QuantizedLinear, pack_nibbles
from farsight.engine.native.library import load_library
from farsight.engine.native.model import quantized_arguments

SUPER = 256
"""Inputs whose coded scales share a factor."""

SGEMM = (512, 2048, 2048)
"""Rows, inputs and outputs of the product that stands for the machine's."""

RANDOM_ROWS = 2048
"""Outputs that differ; the others repeat them."""

SOURCE = Path(__file__).with_name("products.cpp")


@dataclass(frozen=True, slots=True)
class Format:
    """How a matrix is kept.

    Attributes:
        group: Neighbours that share a scale; 0 for floats.
        between: The lowest and the highest integer.
        scales: ``codes`` are those of GGUF's K types: 8 bits times a factor.
    """

    bits: int
    group: int = 0
    between: tuple[int, int] = (0, 15)
    minima: bool = False
    scales: Literal["float16", "bfloat16", "codes"] = "float16"

    def fits(self, inputs: int) -> bool:
        """Tells whether rows of so many inputs can be kept so."""
        return not self.group or inputs % (SUPER if self.scales == "codes" else self.group) == 0

    def num_bytes(self, outputs: int, inputs: int) -> float:
        """Returns the bytes that a product reads."""
        scale = 0.0 if not self.group else (1 / self.group + 2 / SUPER if self.scales == "codes" else 2 / self.group)
        return outputs * inputs * (self.bits / 8 + scale * (1 + self.minima))


FORMATS = {
    "Q4_0": Format(4, 32),
    "Q4_1": Format(4, 32, minima=True),
    "Q4_K": Format(4, 32, minima=True, scales="codes"),
    "Q5_K": Format(8, 32, (0, 31), minima=True, scales="codes"),
    "Q6_K": Format(8, 16, (-32, 31), scales="codes"),
    "Q8_0": Format(8, 32, (-127, 127)),
    "int8": Format(8, 64, (-127, 127), scales="bfloat16"),
    "float32": Format(32),
    "bf16": Format(16),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def layer(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of a layer's matrices."""
        width = self.heads * self.head_dim
        qkv = width + 2 * self.kv_heads * self.head_dim, self.hidden
        return qkv, (self.hidden, width), (2 * self.inner, self.hidden), (self.hidden, self.inner)


SHAPES = {
    "smollm2-135m": Shape(576, 1536, 9, 3, 64, 49_152),
    "qwen3-0.6b": Shape(1024, 3072, 16, 8, 128, 151_936),
    "tiny": Shape(64, 128, 2, 1, 32, 300),
}


def random_record(format: Format, outputs: int, inputs: int) -> QuantizedLinear:
    """Integers and scales that the format can hold."""
    rows, generator = min(outputs, RANDOM_ROWS), torch.Generator().manual_seed(outputs + inputs)
    low, high = format.between
    integers = torch.randint(low, high + 1, (rows, inputs), generator=generator)
    values = integers.to(torch.int8) if format.bits == 8 else pack_nibbles(integers)

    def scales() -> Tensor:
        if format.scales != "codes":
            drawn = torch.randn(rows, inputs // format.group, generator=generator) * 0.01
            return drawn.to(getattr(torch, format.scales)).float()
        supers = inputs // SUPER
        factors = (torch.randn(rows, supers, 1, generator=generator) * 0.001).half().float()
        codes = torch.randint(0, 64, (rows, supers, SUPER // format.group), generator=generator)
        return (factors * codes).view(rows, -1)

    def repeated(drawn: Tensor) -> Tensor:
        return drawn.repeat(-(-outputs // rows), 1)[:outputs].contiguous()

    minima = repeated(scales()) if format.minima else None
    return QuantizedLinear(repeated(values), repeated(scales()), minima, format.bits, format.group)


class Products:
    """The layers of a model and its vocabulary head in one format.

    Args:
        layers: Layers that a decode step goes through.
        most_rows: Rows of a product at most.

    Raises:
        NativeUnavailable: There is no compiler.
    """

    def __init__(self, machine: Machine, shape: Shape, format: Format, layers: int, most_rows: int) -> None:
        self._machine, self._shape, self._format = machine, shape, format
        self._layers = [self._matrix(*size) for size in shape.layer * layers]
        self._head = self._matrix(shape.vocab, shape.hidden)
        weakref.finalize(self, lambda all: [machine.library.fs_free(each) for each in all], [*self._layers, self._head])
        widest = max(inputs for _, inputs in shape.layer)
        self._x = torch.randn(most_rows, widest, generator=torch.Generator().manual_seed(0))
        self._out = torch.empty(most_rows * max(outputs for outputs, _ in shape.layer))
        self._logits = torch.empty(0)

    def _matrix(self, outputs: int, inputs: int) -> ctypes.c_void_p:
        make = self._machine.library.fs_matrix
        if self._format.group:
            record = random_record(self._format, outputs, inputs)
            return ctypes.c_void_p(make(quantized_arguments(record), None, 0, outputs, inputs))
        bf16 = self._format.bits == 16
        drawn = torch.randn(min(outputs, RANDOM_ROWS), inputs).repeat(-(-outputs // RANDOM_ROWS), 1)[:outputs]
        weight = drawn.to(torch.bfloat16 if bf16 else torch.float32).contiguous()
        return ctypes.c_void_p(make(None, ctypes.c_void_p(weight.data_ptr()), int(bf16), outputs, inputs))

    def work(self, rows: int, head_rows: int, layers: int) -> tuple[float, float]:
        """Returns floating-point operations of a step, and bytes of weights."""
        sizes = [(*size, rows) for size in self._shape.layer * layers]
        sizes += [(self._shape.vocab, self._shape.hidden, head_rows)] if head_rows else []
        flops = sum(2.0 * outputs * inputs * num for outputs, inputs, num in sizes)
        return flops, sum(self._format.num_bytes(outputs, inputs) for outputs, inputs, _ in sizes)

    def run(self, rows: int, head_rows: int, layers: int) -> None:
        """Computes one step; ``head_rows`` of the rows get logits."""
        matrices = self._layers[: len(self._shape.layer) * layers]
        self._multiply(matrices, rows, self._out)
        if head_rows:
            if self._logits.numel() < head_rows * self._shape.vocab:
                self._logits = torch.empty(head_rows * self._shape.vocab)
            self._multiply([self._head], head_rows, self._logits)

    def _multiply(self, matrices: list[ctypes.c_void_p], rows: int, out: Tensor) -> None:
        count = len(matrices)
        self._machine.library.fs_products(
            self._machine.team,
            (ctypes.c_void_p * count)(*matrices),
            (ctypes.c_int * count)(*[rows] * count),
            count,
            ctypes.c_void_p(self._x.data_ptr()),
            self._x.shape[1],
            ctypes.c_void_p(out.data_ptr()),
        )


class Machine:
    """What this machine can do with so many threads.

    Args:
        clock: Seconds; of the wall, or of this process's processors.
        read_bytes: As many as the caches cannot hold; 0 for twice the largest cache.
    """

    def __init__(self, threads: int, clock: Callable[[], float] = time.perf_counter, read_bytes: int = 0) -> None:
        flags = ("-I", str(Path(native.__file__ or "").parent))
        self.library: Any = load_library((("quantized_linear.cpp",), ("dense.cpp",), (str(SOURCE), *flags)))
        self.library.fs_team.restype = self.library.fs_matrix.restype = ctypes.c_void_p
        self.team = ctypes.c_void_p(self.library.fs_team(threads))
        weakref.finalize(self, self.library.fs_dismiss, self.team)
        self.threads, self._clock = threads, clock
        self._buffer = torch.ones(read_bytes or 2 * _largest_cache(), dtype=torch.uint8)
        rows, inputs, outputs = SGEMM
        self._a, self._b = torch.randn(rows, inputs), torch.randn(inputs, outputs)
        torch.set_num_threads(threads)

    def seconds(self, call: Callable[[], object]) -> float:
        """Returns what a call takes; on the processors' clock, by thread."""
        began = self._clock()
        call()
        took = self._clock() - began
        return took / self.threads if self._clock is time.process_time else took

    def read_rate(self) -> float:
        """Returns bytes a second of one plain read of more than the caches hold."""
        count = self._buffer.numel()
        address = ctypes.c_void_p(self._buffer.data_ptr())
        return count / self.seconds(lambda: self.library.fs_read(self.team, address, ctypes.c_int64(count)))

    def sgemm_rate(self) -> float:
        """Returns floating-point operations a second of torch's product in float32."""
        rows, inputs, outputs = SGEMM
        return 2.0 * rows * inputs * outputs / self.seconds(lambda: self._a @ self._b)


def _largest_cache() -> int:
    """Returns bytes; 32 MiB where the system does not say."""
    found = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(path.read_text("utf-8").strip().removesuffix("K")) << 10 for path in found), default=32 << 20)
