"""Watches the two daemons of Ray that no other process replaces, and ends everything when one of them dies."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import psutil

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
