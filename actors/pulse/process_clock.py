"""What the system knows of processes and threads on this machine. Linux tells; elsewhere nothing is known."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

from core.messages.pulse import ProcessLife, ThreadClock

_PROC = Path("/proc")
_BEGAN, _STATE = 19, 0
"""Fields of a ``stat`` file, counted from behind the name, which may hold anything."""


def own_life(node_id: str) -> ProcessLife:
    """Of this process; the calling thread is the one that answers."""
    pid = os.getpid()
    return ProcessLife(node_id, pid, _began(pid), threading.get_native_id())


def read_clock(pid: int, thread_id: int) -> ThreadClock | None:
    """None if there is no such thread, or the system does not tell."""
    folder = _PROC / str(pid) / "task" / str(thread_id)
    try:
        computed_ns, waited_ns, _ = (folder / "schedstat").read_text().split()
        state = _stat(folder)[_STATE]
    except (OSError, ValueError):
        return None
    return ThreadClock((int(computed_ns) + int(waited_ns)) / 1e9, runnable=state == "R")


def clock_of(life: ProcessLife) -> ThreadClock | None:
    """Of the thread that answers; None where that process has ended."""
    clock = read_clock(life.pid, life.thread_id)
    return clock if clock is not None and is_alive(life) else None


def is_alive(life: ProcessLife) -> bool:
    """Whether that very process is there still; of this machine."""
    return life.began != 0 and _began(life.pid) == life.began


def kill(life: ProcessLife) -> None:
    """Ends that very process of this machine, also a stopped one; harmless where it has ended."""
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
