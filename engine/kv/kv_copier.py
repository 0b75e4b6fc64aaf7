"""Moves blocks between the device pool and the host pool, beside the step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from core.request import Residency
from engine.kv.copies import Copies
from engine.kv.kv_pool import KVPool
from kvcache import KVCopy


class KVCopier(Copies):
    """One thread that carries out copies in the order in which they are begun.

    The executor ensures that no step writes a source or touches a target while its copy is in flight.
    """

    def __init__(self, device: KVPool, host: KVPool) -> None:
        super().__init__()
        self._device = device
        self._host = host
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copier")

    def begin(self, copy: KVCopy) -> None:
        self.submit(copy.copy_id, self._thread, lambda: self._run(copy))

    @torch.inference_mode()
    def _run(self, copy: KVCopy) -> None:
        if copy.to is Residency.HOST:
            self._host.copy_blocks(copy.target, self._device, copy.source)
        else:
            self._device.copy_blocks(copy.target, self._host, copy.source)
