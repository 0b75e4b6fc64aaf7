"""Move blocks between the device pool and the host pool, beside the steps: in a thread, or on a stream of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from farsight.core.request import Residency
from farsight.engine import cuda
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.kv_pool import KVPool
from farsight.engine.runner import Copier, Copies
from farsight.kvcache import KVCopy

STAGING_BYTES = 64 * 2**20
"""Most bytes of the device's staging buffer for copies; it holds at least one block."""


class KVCopier(Copies):
    """One thread that carries out copies in the order in which they are begun.

    The executor ensures that no step writes a source or touches a target while its copy is in flight.
    """

    def __init__(self, device: KVPool, host: KVPool | None) -> None:
        super().__init__()
        self._device = device
        self.host = host
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copier")

    def begin(self, copy: KVCopy) -> None:
        self.submit(copy.copy_id, self._thread, lambda: self._run(copy))

    @torch.inference_mode()
    def _run(self, copy: KVCopy) -> None:
        assert self.host is not None, "sequences move only where there is a host pool"
        if copy.to is Residency.HOST:
            self.host.copy_blocks(copy.target, self._device, copy.source)
        else:
            self._device.copy_blocks(copy.target, self.host, copy.source)


class Stream(Protocol):
    """Where copies are launched; see ``engine.cuda.SideStream``."""

    def after_steps(self) -> AbstractContextManager[object]: ...
    def mark(self) -> Callable[[], None]: ...


def host_blocks(pool: KVPool, num_blocks: int) -> Tensor:
    """Makes blocks in host memory, each contiguous: on the device a block lies in as many places as there are layers.

    Returns:
        ``[num_blocks, 2, layers, elements of a block in a layer]``, in the dtype of the pool.
    """
    return torch.empty(num_blocks, *pool.block_shape, dtype=pool.dtype)


class StreamCopier(Copies):
    """Copies in the order in which they are begun; a thread only waits for their ends.

    The executor ensures that no step writes a source or touches a target while its copy is in flight. A step that was
    launched before a copy may still use what the copy reads or overwrites, so the copy runs after that step.
    """

    def __init__(self, device: KVPool, host: Tensor, stream: Stream) -> None:
        super().__init__()
        self._device = device
        self._host = host
        self._stream = stream
        block = host[0]
        num_staged = max(1, STAGING_BYTES // (block.numel() * block.element_size()))
        self._staging = torch.empty(num_staged, *block.shape, dtype=block.dtype, device=device.device)
        self._waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copies")

    @torch.inference_mode()
    def begin(self, copy: KVCopy) -> None:
        """Launches a copy. If the launch fails, the copy is reported as failed, like any other."""
        with self._stream.after_steps():
            try:
                self._launch(copy)
            except Exception as error:
                self.submit(copy.copy_id, self._waiter, _raising(error))
            else:
                self.submit(copy.copy_id, self._waiter, self._stream.mark())

    def _launch(self, copy: KVCopy) -> None:
        num_staged = len(self._staging)
        for first in range(0, len(copy.source), num_staged):
            source, target = copy.source[first : first + num_staged], copy.target[first : first + num_staged]
            staged = self._staging[: len(source)]
            if copy.to is Residency.HOST:
                self._device.read_blocks(source, staged)
                for row, block in zip(staged, target, strict=True):
                    self._host[block].copy_(row, non_blocking=True)
            else:
                for row, block in zip(staged, source, strict=True):
                    row.copy_(self._host[block], non_blocking=True)
                self._device.write_blocks(target, staged)


def _raising(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def make_copier(config: DecoderConfig, pool: KVPool, num_host_blocks: int, *, on_gpu: bool) -> Copier | None:
    """Makes the host pool beside a pool, and the copier between the two; None where the host has no blocks."""
    if not num_host_blocks:
        return None
    if on_gpu:
        host = host_blocks(pool, num_host_blocks)
        cuda.pin(host)
        return StreamCopier(pool, host, cuda.SideStream())
    host_pool = KVPool(config, num_blocks=num_host_blocks, block_size=pool.block_size, dtype=pool.dtype)
    return KVCopier(pool, host_pool)
