"""Reads clocks and identities of processes and threads on this machine from Linux; elsewhere nothing is known."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

from core.messages.status import ProcessLife, ThreadClock

_PROC = Path("/proc")
_BEGAN, _STATE = 19, 0
"""Indexes of fields of a ``stat`` file, counted after the process name, which may hold any characters."""

_RUNNABLE = ("R", "D")
"""States of a thread that computes or waits for a processor (R), or that waits for the disk (D), as for a page of the
program that the system has dropped from memory: on a busy machine such a wait takes seconds and proves no hang."""


def own_life(node_id: str) -> ProcessLife:
    """Returns the identity of this process; records the calling thread as the thread that answers."""
    pid = os.getpid()
    return ProcessLife(node_id, pid, _began(pid), threading.get_native_id())


def read_clock(pid: int, thread_id: int) -> ThreadClock | None:
    """Reads the clock of a thread; None if there is no such thread or the system does not provide the clock."""
    folder = _PROC / str(pid) / "task" / str(thread_id)
    try:
        computed_ns, waited_ns, _ = (folder / "schedstat").read_text().split()
        state = _stat(folder)[_STATE]
    except (OSError, ValueError):
        return None
    return ThreadClock((int(computed_ns) + int(waited_ns)) / 1e9, runnable=state in _RUNNABLE)


def clock_of(life: ProcessLife) -> ThreadClock | None:
    """Reads the clock of the thread that answers; None if the process has ended."""
    clock = read_clock(life.pid, life.thread_id)
    return clock if clock is not None and is_alive(life) else None


def is_alive(life: ProcessLife) -> bool:
    """Returns whether this process still exists on this machine; a later process with the same pid does not count."""
    return life.began != 0 and _began(life.pid) == life.began


def kill(life: ProcessLife) -> None:
    """Kills this process on this machine, also if it is stopped; does nothing if it has ended."""
    if is_alive(life):
        with contextlib.suppress(ProcessLookupError):
            os.kill(life.pid, signal.SIGKILL)


def _began(pid: int) -> int:
    try:
        return int(_stat(_PROC / str(pid))[_BEGAN])
    except (OSError, ValueError):
        return 0


def _stat(folder: Path) -> list[str]:
    return (folder / "stat").read_text().rpartition(")")[2].split()
