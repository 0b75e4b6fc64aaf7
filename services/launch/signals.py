"""What Ctrl-C and TERM do to ``farsight serve``."""

from __future__ import annotations

import os
import signal
import types
from collections.abc import Callable

import psutil

INTERRUPTED = 130
"""Exit status of a start that was interrupted: 128 + SIGINT, as shells have it."""

_KILL_TIMEOUT_S = 5.0


class StopSignal:
    """Abandons a start, ends a running service.

    A start cannot be unwound: Ray's C++ parts crash when an exception passes through them. Nothing is being served
    yet, so what was started is killed and the process ends at once.
    """

    def __init__(self) -> None:
        self.received = False
        self._clean_up: Callable[[], None] = lambda: None
        self._running = False
        self.install()

    def install(self) -> None:
        """Takes the signals; once more after Ray has started, which takes TERM for itself."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def starting(self, clean_up: Callable[[], None]) -> None:
        """From here on an abandoned start has something to clean up behind it."""
        self._clean_up = clean_up

    def running(self) -> None:
        """From here on a signal only sets ``received``."""
        self._running = True

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        self.received = True
        if not self._running:
            kill_children()
            self._clean_up()
            os._exit(INTERRUPTED)


def kill_children() -> None:
    """Ends every process that this one started, directly or not, and waits until they are gone."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(children, timeout=_KILL_TIMEOUT_S)
