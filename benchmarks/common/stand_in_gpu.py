"""A stand-in for a Hopper GPU: Triton compiles for it, nothing is launched, and tensors lie in host memory.

What a kernel would be asked to do is bound and specialised as on a GPU, so a kernel that would be compiled there while
serving is compiled here. What it would have computed is whatever the memory held.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from farsight.engine import cuda
from farsight.engine.attention import choice
from farsight.engine.attention.triton_attention import TritonAttention
from farsight.engine.checkpoint.families.record import LayerShape
from farsight.engine.devices import model_device
from farsight.engine.models import model
from farsight.engine.models.fused_layers import FusedLayers
from farsight.engine.sampling.device_draws import DeviceDraws
from farsight.engine.steps import backends
from farsight.engine.steps.decode_graphs import LaunchedTokens
from farsight.engine.steps.recording import Capture

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on compute capability 9.0."""


DRAWN = 5
"""The token that every draw yields."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """As much of a model's configuration as a pool reads."""

    head_dim: int
    num_key_value_heads: int
    num_hidden_layers: int = 1
    kv_rows: int = 2
    state_size: int = 0

    @property
    def kv_layers(self) -> range:
        return range(self.num_hidden_layers)

    def shape(self, layer: int) -> LayerShape:
        """Returns the sizes of a layer, as ``DecoderConfig.shape``."""
        return LayerShape(self.head_dim, self.num_key_value_heads, 0)


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
        if kernel is not None and id(kernel) not in made:  # None: it is put off (``compile_side_by_side``)
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


class _Draws(DeviceDraws):
    """Draws the same token always, where the kernel would have been launched."""

    def draw(self, logits: Tensor, tokens: Tensor) -> None:
        super().draw(logits, tokens)
        tokens.fill_(DRAWN)


def _logits(rows: Tensor, config: Any, norm: Any, lm_head: Any, head_bias: Any = None) -> Tensor:
    """Returns zeros: the product is the GPU's, and here a slow one."""
    return torch.zeros(len(rows), config.vocab_size)


class _Launched(LaunchedTokens):
    """What recorded steps yield that compute nothing."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        super().__init__(max_rows, device)
        self.tokens.fill_(DRAWN)


@contextmanager
def serving(pool_bytes: int, capture: Capture, *, largest_step: bool = True) -> Iterator[list[Any]]:
    """Puts devices together as on a GPU, over memory of this machine; yields the kernels that are compiled.

    Args:
        pool_bytes: Bytes that are left for the KV pool.
        capture: Records the work of a step.
        largest_step: Whether the largest step is computed at the start, as on a GPU.
    """

    def free_bytes(share: float, step: Callable[[], object], more_bytes: int) -> int:
        if largest_step:
            step()
        return pool_bytes

    def draws(sizes: Any, config: Any, device: torch.device) -> DeviceDraws:
        return _Draws(sizes.rows[-1], config.vocab_size, device)

    with ExitStack() as stack:
        for owner, name, value in (
            (cuda, "device_problem", lambda: None),
            (cuda, "free_bytes", free_bytes),
            (cuda, "Graphs", lambda: capture),
            (cuda, "synchronize", lambda: None),
            (backends, "make_draws", draws),
            (model_device, "make_draws", draws),
            (backends, "LaunchedTokens", _Launched),
            (model, "output_logits", _logits),
            (model, "make_layers", lambda *args, compiled: FusedLayers(*args)),
            (model_device, "load_device", model_device.load_gpu_device),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(patch.dict(choice.KERNELS, {"triton": TritonAttention.of_model}))
        yield stack.enter_context(compiling())


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
