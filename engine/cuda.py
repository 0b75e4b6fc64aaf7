"""The calls to CUDA, as thin as they can be: what is around them runs, and is tested, without a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from farsight.core.errors import ConfigError


def device_problem() -> str | None:
    """Tells why there is no GPU to compute on; None if there is."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return None if torch.cuda.is_available() else "torch sees no GPU"


def check_device(device: str) -> None:
    """Raises ConfigError if a GPU is to compute and there is none."""
    problem = device_problem() if device == "cuda" else None
    if problem is not None:
        raise ConfigError("engine.device", device, f"cpu ({problem})")


def free_bytes(utilization: float, step: Callable[[], object], more_bytes: int = 0) -> int:
    """Returns the bytes that a share of the device's memory leaves beside those in use now and the peak of ``step``.

    Args:
        utilization: The share, in (0, 1].
        step: What it returns lives while memory is counted: recorded steps have some that torch knows nothing of.
        more_bytes: What else will be taken.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    kept = step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()  # the context, recorded steps, other processes
    del kept
    gc.collect()  # a recorded step and its owner know one another
    torch.cuda.empty_cache()
    return int(total * utilization) - others - peak - more_bytes


def synchronize() -> None:
    """Returns when the device has done all launched work."""
    torch.cuda.synchronize()


def marker(device: torch.device) -> Callable[[], Callable[[], None]]:
    """Returns what marks the work launched so far: a function that returns, when called, a wait for the end of that.

    Without a GPU work is done when it is launched.
    """
    if device.type != "cuda":
        return lambda: _done

    def mark() -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    return mark


def _done() -> None:
    pass


class Mirrored:
    """Memory of the device that the host fills, without waiting for the device.

    The host has two copies and writes them by turns: the device may not have fetched the other one yet.

    Attributes:
        there: ``[size]``, on the device; its address stays.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.there = torch.zeros(size, dtype=dtype, device=device)
        self._here = [torch.zeros(size, dtype=dtype, pin_memory=pinned) for _ in range(2)]

    def take(self) -> np.ndarray:
        """Returns the copy to write next, ``[size]``; it holds what was written two turns ago."""
        self._here.reverse()
        values: np.ndarray = self._here[0].numpy()
        return values

    def send(self, num: int | None = None) -> None:
        """Launches the copy to the device: of the first ``num`` elements, or of all."""
        self.there[:num].copy_(self._here[0][:num], non_blocking=True)


def is_lost() -> bool:
    """Returns whether an error has made the device unusable here, as an index out of bounds in a kernel does."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def recover() -> None:
    """Returns the allocator's unused memory to the device; called after a failed allocation."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def lost_on(device: str) -> Callable[[], bool]:
    """Returns what tells whether the device has become unusable for this process: ``is_lost``; a CPU never does."""
    return is_lost if device == "cuda" else lambda: False


def recover_on(device: str) -> Callable[[], None]:
    """Returns what frees memory of a device that has run out of it: ``recover``; on a CPU nothing."""
    return recover if device == "cuda" else lambda: None


class Graphs:
    """Captures work in CUDA graphs that share their memory: only one of them runs at a time.

    All on one stream: memory is shared by work of the same stream only, and cuBLAS keeps a workspace (32 MiB on Hopper)
    for each stream that it has ever been called on.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        """Runs it once, so that everything is compiled, then records it; returns what runs it again."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            run()
        replay: Callable[[], None] = graph.replay
        return replay


class SideStream:
    """A stream beside that of the steps."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def after_steps(self) -> AbstractContextManager[object]:
        """Has the work launched inside run on this stream, after all work launched so far on the caller's stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def mark(self) -> Callable[[], None]:
        """Returns, within ``after_steps``, a function that returns when all work launched so far is done."""
        return marker(torch.device("cuda"))()


def pin(tensor: Tensor) -> None:
    """Locks a CPU tensor's memory in place, where the device reaches it by itself, as long as the tensor lives.

    Not ``pin_memory``, whose allocator rounds up to powers of two: a pool would take up to twice its size.

    Raises:
        RuntimeError: the system does not allow so much.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    num_bytes = tensor.numel() * tensor.element_size()
    code = int(runtime.cudaHostRegister(tensor.data_ptr(), num_bytes, 0))
    if code:
        raise RuntimeError(f"{num_bytes} bytes of host memory cannot be pinned: CUDA error {code}")
    weakref.finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr()).atexit = False
