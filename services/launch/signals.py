"""The effects of Ctrl-C and TERM on ``farsight serve``."""

from __future__ import annotations

import os
import signal
import types
from collections.abc import Callable

import psutil

INTERRUPTED = 130
"""Exit status of an interrupted start: 128 + SIGINT, as in shells."""

_KILL_TIMEOUT_S = 5.0


class StopSignal:
    """Abandons a start, ends a running service.

    A start cannot be unwound: Ray's C++ code crashes when an exception passes through it. The service has no requests
    yet, so a signal kills the started processes and ends this process at once.
    """

    def __init__(self) -> None:
        self.received = False
        self._clean_up: Callable[[], None] = lambda: None
        self._running = False
        self.install()

    def install(self) -> None:
        """Installs the handlers; call it again after Ray has started, since Ray installs its own TERM handler."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def starting(self, clean_up: Callable[[], None]) -> None:
        """From here on, an abandoned start calls this clean-up."""
        self._clean_up = clean_up

    def running(self) -> None:
        """From here on, a signal only sets ``received``."""
        self._running = True

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        self.received = True
        if not self._running:
            kill_children()
            self._clean_up()
            os._exit(INTERRUPTED)


def kill_children() -> None:
    """Ends every descendant of this process and waits until all have ended."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(children, timeout=_KILL_TIMEOUT_S)
