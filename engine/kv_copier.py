"""Moves blocks between the device pool and the host pool, beside the step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

from core.request import Residency
from engine.kv_pool import KVPool
from kvcache import KVCopy

logger = logging.getLogger(__name__)


class KVCopier:
    """One thread that carries out copies in the order in which they are begun.

    Nobody else writes a source or touches a target while its copy is in flight: the executor sees to that.
    """

    def __init__(self, device: KVPool, host: KVPool) -> None:
        self._device = device
        self._host = host
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copier")
        self._in_flight: dict[int, Future[None]] = {}
        self._on_done: Callable[[], object] = lambda: None

    def when_done(self, callback: Callable[[], object]) -> None:
        """``callback`` is called from the copying thread after each copy."""
        self._on_done = callback

    def begin(self, copy: KVCopy) -> None:
        future = self._in_flight[copy.copy_id] = self._thread.submit(self._run, copy)
        future.add_done_callback(lambda _: self._on_done())

    def take_done(self) -> list[tuple[int, bool]]:
        """(copy id, whether it failed) of the copies that have ended since the last call."""
        done = [(copy_id, future) for copy_id, future in self._in_flight.items() if future.done()]
        for copy_id, future in done:
            del self._in_flight[copy_id]
            if future.exception() is not None:
                logger.error("copy %d failed", copy_id, exc_info=future.exception())
        return [(copy_id, future.exception() is not None) for copy_id, future in done]

    def wait(self) -> None:
        """Returns when one of the copies in flight has ended; at once if there are none."""
        if self._in_flight:
            wait(self._in_flight.values(), return_when=FIRST_COMPLETED)

    @torch.inference_mode()
    def _run(self, copy: KVCopy) -> None:
        if copy.to is Residency.HOST:
            self._host.copy_blocks(copy.target, self._device, copy.source)
        else:
            self._device.copy_blocks(copy.target, self._host, copy.source)
