"""The effects of Ctrl-C and TERM on ``farsight serve``."""

from __future__ import annotations

import os
import signal
import threading
import time
import types
from collections.abc import Callable
from typing import NoReturn

import psutil

INTERRUPTED = 130
"""Exit status of an interrupted start: 128 + SIGINT, as in shells."""

_KILL_TIMEOUT_S = 5.0
_LOOK_S = 0.05


class StopSignal:
    """Abandons a start; ends a running service, after TERM once its requests have ended.

    A start cannot be unwound: Ray's C++ code crashes when an exception passes through it. The service has no requests
    yet, so a signal kills the started processes and ends this process at once.
    """

    def __init__(self) -> None:
        self._num_received = 0
        self._drains = False
        self._halts: list[Callable[[], None]] = []
        self._clean_ups: list[Callable[[], None]] = []
        self._running = False
        self._abandoning = threading.RLock()  # a second signal may interrupt the clean-up after the first
        self.install()

    def install(self) -> None:
        """Installs the handlers; call it again after Ray has started, since Ray installs its own TERM handler."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def starting(self, clean_up: Callable[[], None]) -> None:
        """From here on, ``abandon`` calls this clean-up as well."""
        self._clean_ups.append(clean_up)

    def keeps(self, halt: Callable[[], None]) -> None:
        """From here on, ``abandon`` first calls this, for a part of this process that starts again what it kills."""
        self._halts.append(halt)

    def running(self) -> None:
        """From here on, a signal only sets ``received``."""
        self._running = True

    @property
    def received(self) -> bool:
        """Whether any signal came."""
        return self._num_received > 0

    @property
    def at_once(self) -> bool:
        """Whether requests get no time to end: the first signal was Ctrl-C, or a second one came."""
        return self._num_received > 1 or (self.received and not self._drains)

    def wait(self, seconds: float) -> None:
        """Sleeps for so long, or until requests get no more time."""
        deadline = time.monotonic() + seconds
        while not self.at_once and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(left_s, _LOOK_S))

    def abandon(self, status: int) -> NoReturn:
        """Kills all processes that were started, cleans up and ends this process; may be called from any thread."""
        with self._abandoning:
            for halt in self._halts:
                halt()
            kill_children()
            for clean_up in self._clean_ups:
                clean_up()
            os._exit(status)

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        if not self._num_received:
            self._drains = number == signal.SIGTERM
        self._num_received += 1
        if not self._running:
            self.abandon(INTERRUPTED)


def kill_children() -> None:
    """Ends every descendant of this process and waits until all have ended."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(children, timeout=_KILL_TIMEOUT_S)
