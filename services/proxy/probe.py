"""Tells a HAProxy that stands still from one that is busy."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

PROBE_S = 0.5
"""Between two probes."""

ANSWER_S = 0.5
"""How long a probe waits for its answer."""

STOPPED_PROBES = 2
"""Probes without an answer after which a process that the system has stopped (SIGSTOP, a debugger) is stuck."""

IDLE_PROBES = 20
"""Probes without an answer after which a process is stuck that has used no processor time since the first of them."""

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def answers(admin_socket: Path) -> bool:
    """Whether HAProxy answers at its admin socket, which the same threads serve as its clients."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as admin:
        admin.settimeout(ANSWER_S)
        admin.connect(str(admin_socket))
        admin.sendall(b"show version\n")
        return bool(admin.recv(64))
    return False


@dataclass(slots=True)
class Silence:
    """Consecutive probes of one process that got no answer.

    A busy process uses processor time, so it is never stuck, however long it is silent. One that spins is ended by
    HAProxy's own watchdog.
    """

    pid: int = 0
    num_probes: int = 0
    cpu_s: float = 0.0

    def is_stuck(self, pid: int, answered: bool, state: Callable[[int], tuple[bool, float]]) -> bool:
        """Counts one probe; returns whether the process will not answer by itself.

        Args:
            state: Whether a process is stopped, and the processor seconds that it has used; asked after silence only.
        """
        if answered or not pid:
            self.num_probes = 0
            return False
        stopped, cpu_s = state(pid)
        if pid != self.pid or cpu_s != self.cpu_s:
            self.pid, self.cpu_s, self.num_probes = pid, cpu_s, 0
        self.num_probes += 1
        return self.num_probes >= (STOPPED_PROBES if stopped else IDLE_PROBES)


def process_state(pid: int) -> tuple[bool, float]:
    """Whether the process is stopped, and the processor seconds that it has used; zero if it has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        times = process.cpu_times()
        return process.status() in _STOPPED, times.user + times.system
    return False, 0.0
