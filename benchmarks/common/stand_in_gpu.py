"""A stand-in for a Hopper GPU: Triton compiles for it, nothing is launched, and tensors lie in host memory.

What a kernel would be asked to do is bound and specialised as on a GPU, so a kernel that would be compiled there while
serving is compiled here. What it would have computed is whatever the memory held.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on compute capability 9.0."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """As much of a model's configuration as a pool reads."""

    head_dim: int
    num_key_value_heads: int
    num_hidden_layers: int = 1
    kv_rows: int = 2


class _Hopper:
    """As much of a driver as binding and compiling ask for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> str:
        return "stand-in"  # kernels are kept by device: none of these is ever taken for one of a real GPU

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel, and what a program of it takes on the GPU.

    Attributes:
        registers: Those of each thread.
        spilled: Bytes of local memory of each thread; 0 if registers suffice.
        shared: Bytes of shared memory.
    """

    name: str
    warps: int
    registers: int
    spilled: int
    shared: int


@contextmanager
def compiling() -> Iterator[list[Any]]:
    """Compiles kernels where they would be launched; yields the distinct ones, in their order."""
    made: dict[int, Any] = {}
    run, active = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if id(kernel) not in made:
            made[id(kernel)] = kernel
            found.append(kernel)
        return kernel

    found: list[Any] = []
    JITFunction.run = compile_only
    driver.set_active(_Hopper())
    try:
        yield found
    finally:
        JITFunction.run = run
        driver._active = active  # there may be none, and to ask for one would fail


def resources(kernel: Any) -> Compiled:
    """Reads what a compiled kernel takes, by NVIDIA's own tool."""
    with tempfile.TemporaryDirectory() as directory:
        binary = Path(directory) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        told = subprocess.run([_CUOBJDUMP, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    # Function NAME: REG:128 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:600 ...
    usage = {key: int(value) for key, _, value in (word.partition(":") for word in told.split()) if value.isdigit()}
    return Compiled(
        kernel.metadata.name,
        kernel.metadata.num_warps,
        usage["REG"],
        usage["STACK"] + usage["LOCAL"],
        kernel.metadata.shared,
    )
