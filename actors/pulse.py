"""Whether a process makes progress: its own report, and the judgement of its watcher."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

from farsight.core.messages.status import ProcessLife, Pulse, ThreadClock, Work

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


PATIENCE = 10.0
"""Factor on the time bound for a thread that computes, waits for a processor, or whose activity is unknown."""

START_S = 600.0
"""Seconds that a process which has never answered may take to come up.

A process that answered while it was starting gets this time too, or a tenth of it if its thread stands still: while
one thread loads a library as large as torch, each thread that needs the system's loader is blocked.
"""

MAX_LATE = 2.0
"""A reading counts for at most so many periods, so that a late watcher does not condemn the process."""


class Stillness:
    """Measures how long an answer has been due, and for how much of that time the answering thread has stood still."""

    def __init__(self) -> None:
        self.due_s = 0.0
        self.still_s = 0.0
        self._clock: ThreadClock | None = None

    def look(self, passed_s: float, clock: ThreadClock | None, bound_s: float) -> bool:
        """Takes one reading; returns whether the answer must be given up.

        Args:
            passed_s: Seconds since the last reading.
            clock: Present clock of the thread that should answer; None if it cannot be read.
            bound_s: Seconds after which the answer is given up if the thread stands still; ``PATIENCE`` times as many
                if it does not.
        """
        self.due_s += passed_s
        before, self._clock = self._clock, clock
        if clock is None or clock.runnable or (before is not None and clock.effort_s != before.effort_s):
            self.still_s = 0.0
        elif before is not None:
            self.still_s += passed_s
        return self.still_s >= bound_s or self.due_s >= PATIENCE * bound_s


class HostJudge:
    """Judges one process.

    Args:
        silence_s: Seconds that a process whose thread stands still may leave a question unanswered.
        period_s: Seconds between two looks, if the watcher is in time.
    """

    def __init__(self, silence_s: float, period_s: float) -> None:
        self._silence_s = silence_s
        self._period_s = period_s
        self._looked_at: float | None = None
        self._heard = False
        self._starting = False
        self._silence = Stillness()
        self._work: dict[str, tuple[int, Stillness]] = {}

    def look(self, now: float, pulse: Pulse | None, clock: ThreadClock | None) -> str:
        """Returns why the process must be replaced; empty if it need not be.

        Args:
            pulse: The answer of the process since the last look; None if there was none.
            clock: Present clock of the thread that answers; None if it cannot be read.
        """
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, MAX_LATE * self._period_s)
        self._looked_at = now
        if pulse is not None:
            self._heard, self._starting = True, pulse.starting
            self._silence = Stillness()
            return self._stuck(pulse.work, passed_s)
        is_up = (self._heard or clock is not None) and not self._starting
        bound_s = self._silence_s if is_up else max(self._silence_s, START_S / PATIENCE)
        if not self._silence.look(passed_s, clock, bound_s):
            return ""
        how = ", stopped or blocked" if self._silence.still_s >= bound_s else ""
        return f"no answer for {self._silence.due_s:.1f} s{how}"

    def _stuck(self, work: tuple[Work, ...], passed_s: float) -> str:
        """Returns which component is stuck in a unit of work, and how; empty if none is."""
        before, self._work = self._work, {}
        for each in work:
            count, stillness = before.get(each.name, (None, Stillness()))
            is_same = count == each.count
            if not is_same:
                stillness = Stillness()
            self._work[each.name] = each.count, stillness
            if stillness.look(passed_s if is_same else 0.0, each.clock, each.bound_s):
                how = "blocked" if stillness.still_s >= each.bound_s else "computing or waiting for a processor"
                return f"{each.name}: work {each.count} has not ended for {stillness.due_s:.1f} s, {how}"
        return ""
