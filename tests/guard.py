"""The guard of one process that runs tests: what its tests started, what that costs, and its end.

``python guard.py ROOT_PID MARK`` finds the processes that carry ``MARK`` in their environment (whatever a test starts
inherits it, also what has left its session or lost its parent). The standard input takes lines:

- ``file NAME``: from now on processor seconds are booked for that file
- ``table``: answers with one line of JSON, processor seconds by file

When the standard input ends, however the tests ended, the guard kills what is left.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections import defaultdict
from dataclasses import dataclass

SAMPLE_S = 1.0
"""Seconds between two looks; what lives shorter and is no child of a process that stays is not counted."""

GIVE_UP_S = 30.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Seen:
    """One process.

    Attributes:
        began: Its start, in ticks since the machine's; tells it from a later process with its number.
        parent: The process that will take its times over when it has ended.
        ticks: Processor time of it and of the children that it has waited for.
    """

    began: int
    parent: int
    ticks: int


class Ledger:
    """Books the processor time of the tests' process and of all that it started.

    Args:
        root: The process that runs the tests.
        mark: ``NAME=VALUE`` in the environment of what it starts.
        with_children: False for a process whose children have guards of their own.
    """

    def __init__(self, root: int, mark: str, with_children: bool = True) -> None:
        self._root, self._mark, self._with_children = root, mark.encode(), with_children
        self._seen: dict[int, Seen] = {}
        self._strangers: dict[int, int] = {}
        self._orphans = 0
        """Ticks of processes whose parent was none of the tests' own."""
        self._booked = 0
        self._file = "collection"
        self._ticks: defaultdict[str, int] = defaultdict(int)

    def switch(self, file: str) -> None:
        """Books what was used so far, and from now on for ``file``."""
        self.look()
        self._file = file

    def seconds(self) -> dict[str, float]:
        self.look()
        return {file: ticks / TICKS_PER_S for file, ticks in self._ticks.items()}

    def look(self) -> None:
        """Reads the times of every process."""
        now = {pid: seen for pid in _pids() if (seen := self._read(pid)) is not None}
        for pid, seen in self._seen.items():
            gone = pid not in now or now[pid].began != seen.began
            if gone and not self._has_heir(seen, now):
                self._orphans += seen.ticks
        self._seen = now
        used = self._orphans + sum(seen.ticks for seen in now.values())
        self._ticks[self._file] += max(0, used - self._booked)
        self._booked = used  # less than before where a parent that lives has not waited for its child

    def _has_heir(self, seen: Seen, now: dict[int, Seen]) -> bool:
        """Whether some process that lives has waited for it, or for who had."""
        parent: Seen | None = seen
        while parent is not None:
            if parent.parent in now:
                return True
            parent = self._seen.get(parent.parent)
        return False

    def living(self) -> list[int]:
        """Marked processes other than the one that runs the tests."""
        return [pid for pid in _pids() if pid not in (self._root, os.getpid()) and self._is_marked(pid)]

    def _read(self, pid: int) -> Seen | None:
        if pid == os.getpid() or (pid != self._root and not self._with_children):
            return None
        known = self._seen.get(pid)
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return None
        began, parent = int(fields[19]), int(fields[1])
        ticks = sum(map(int, fields[11:15] if self._with_children else fields[11:13]))
        seen = Seen(began, parent, ticks)
        if pid == self._root or (known is not None and known.began == began):
            return seen
        if self._strangers.get(pid) == began:
            return None
        if self._is_marked(pid):
            return seen
        self._strangers[pid] = began
        return None

    def _is_marked(self, pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                return self._mark in file.read().split(b"\0")
        except OSError:
            return False


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def end(ledger: Ledger) -> list[int]:
    """Kills what is left, again until nothing is: a process may start another while it is being killed.

    Returns:
        What was left at the first look.
    """
    found = ledger.living()
    left, deadline = found, time.monotonic() + GIVE_UP_S
    while left and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
        left = ledger.living()
    return found


def main(root: int, mark: str, with_children: bool) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the tests' end is what ends the guard
    ledger, pending = Ledger(root, mark, with_children), b""
    while True:
        ready, _, _ = select.select([0], [], [], SAMPLE_S)
        if not ready:
            ledger.look()
            continue
        data = os.read(0, 1 << 16)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == "file":
                ledger.switch(rest)
            elif word == "table":
                os.write(1, json.dumps(ledger.seconds()).encode() + b"\n")
    end(ledger)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:] != ["alone"])
