"""CPU time and memory of a process and all its descendants."""

from __future__ import annotations

import psutil


class ProcessTree:
    """A process and its descendants.

    Args:
        pid: The root.

    Raises:
        psutil.NoSuchProcess: there is none.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)

    def processes(self) -> list[psutil.Process]:
        """The processes of the tree that live now."""
        return [self._root, *self._root.children(recursive=True)]

    def cpu_s(self) -> float:
        """CPU seconds used so far, including descendants that ended and were waited for."""
        total = 0.0
        for process in self.processes():
            try:
                total += sum(process.cpu_times()[:4])
            except psutil.NoSuchProcess:
                continue
        return total

    def cpu_by_process(self) -> dict[str, float]:
        """CPU seconds by pid and title."""
        used = {}
        for process in self.processes():
            try:
                title = " ".join(process.cmdline()[:3])[-60:] or process.name()
                used[f"{process.pid} {title}"] = sum(process.cpu_times()[:2])
            except psutil.NoSuchProcess:
                continue
        return used

    def pss_bytes(self) -> int:
        """Memory in bytes; each shared page is divided among the processes that share it."""
        total = 0
        for process in self.processes():
            try:
                total += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
        return total


def machine_cpu_s() -> float:
    """CPU seconds that the whole machine has worked since it started."""
    times = psutil.cpu_times()._asdict()
    used: float = sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    return used
