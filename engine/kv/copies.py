"""Copies that threads carry out beside the steps: which are in flight, which have ended and how."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait

logger = logging.getLogger(__name__)


class Copies:
    """Copies that have begun and whose ends have not been collected. All but the callback belongs to one thread."""

    def __init__(self) -> None:
        self._in_flight: dict[int, Future[None]] = {}
        self._on_done: Callable[[], object] = lambda: None

    def when_done(self, callback: Callable[[], object]) -> None:
        """``callback`` is called from the copying thread after each copy."""
        self._on_done = callback

    def submit(self, copy_id: int, thread: Executor, work: Callable[[], None]) -> None:
        """Starts a copy in a thread."""
        future = self._in_flight[copy_id] = thread.submit(work)
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
