"""What ends a service: Ctrl-C and TERM, the drain after a TERM, and the death of a daemon of Ray."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import psutil

from farsight.core.messages.supervision import DrainProgress, DrainService

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


ASK_S = 0.2
"""Seconds between two orders to drain."""

LAST_ERRORS_S = 3.0
"""Seconds after the time limit in which the ingress replicas tell the remaining clients that their requests end."""

LAST_BYTES_S = 0.5
"""Seconds after the last request in which the proxy passes on what it still holds of the answers."""

Order = Callable[[DrainService], DrainProgress | None]
"""Gives the Supervisor the order; None if no Supervisor answers now."""


def drain(
    order: Order, stop: StopSignal, drain_s: float, num_ingress: int, say: Callable[[str], None]
) -> DrainProgress | None:
    """Returns when no request is open, the time is over, or a second signal came; the last thing that was heard.

    Args:
        drain_s: Seconds that open requests have to end by themselves.
    """
    began = time.monotonic()
    say(f"Draining: new requests are refused, open ones have {drain_s:g} s. A second signal ends them at once.")
    heard: DrainProgress | None = None
    while not stop.at_once and time.monotonic() - began < drain_s + LAST_ERRORS_S:
        left_s = max(0.0, began + drain_s - time.monotonic())
        heard = order(DrainService(left_s, num_ingress)) or heard
        if heard is not None and heard.is_over:
            stop.wait(LAST_BYTES_S)
            break
        stop.wait(ASK_S)
    took_s = math.ceil(time.monotonic() - began)
    if stop.at_once:
        say(f"Not drained: a second signal came; {_open(heard)}.")
    elif heard is None or not heard.is_over:
        say(f"Not drained after {took_s} s: {_open(heard)}.")
    else:
        say(f"Drained after {took_s} s.")
    return heard


def _open(heard: DrainProgress | None) -> str:
    return "what is open is not known" if heard is None else f"open requests: {heard.num_open}"


LOOK_S = 0.5
"""Seconds between two looks at the daemons."""

_NAMES = {"raylet": "the raylet, which starts processes", "gcs_server": "the GCS, which knows all processes"}


def daemons() -> list[psutil.Process]:
    """Ray's raylet and GCS among the children of this process."""
    return [child for child in psutil.Process().children() if _name(child) in _NAMES]


def first_dead(watched: Sequence[psutil.Process]) -> psutil.Process | None:
    """The first process that has ended; None if all live."""
    return next((process for process in watched if not _lives(process)), None)


@contextlib.contextmanager
def watched_daemons(dead: Callable[[str], None]) -> Iterator[None]:
    """Watches the daemons inside this context, in a thread: calls of Ray may not return once one has died.

    Args:
        dead: Called in the thread, with the name of what has died.
    """
    watched = {process: _name(process) for process in daemons()}
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            process = first_dead(list(watched))
            if process is not None and not over.is_set():
                dead(f"{_NAMES[watched[process]]} (pid {process.pid})")
                return

    thread = threading.Thread(target=look, name="daemons", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str(process.name())
    return ""


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
