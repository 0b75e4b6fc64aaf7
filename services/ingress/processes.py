"""What the processes of the service on this node cost: processor time and memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil

from actors.runtime.names import RUN_DIR_VARIABLE
from core.messages.status import ProcessUse

_COMMANDS = ("template_process", "body_workers", "what_if_process", "raylet", "gcs_server", "haproxy")
_RAY = {"dashboard.py": "dashboard", "agent.py": "agent", "main.py": "runtime-env agent"}


def processes_here() -> tuple[ProcessUse, ...]:
    """Returns every process of the service on this node, Ray's and HAProxy among them; none outside a Ray cluster.

    Memory is proportional (PSS): shared memory is divided among its processes, so that a sum is right. The call takes a
    few milliseconds for each process.
    """
    return tuple(_use(process, name) for process, name in _family())


def _family() -> Iterator[tuple[psutil.Process, str]]:
    """Yields the raylet above this process and all its descendants; under ``farsight serve``, that command's instead.

    That command is the parent of the raylet and of the GCS. A raylet of another node, or of ``ray start``, has none.
    """
    for ancestor in psutil.Process().parents():
        if ancestor.name() == "raylet":
            above = ancestor.parent() if RUN_DIR_VARIABLE in os.environ else None
            is_ours = above is not None and any(child.name() == "gcs_server" for child in above.children())
            top, name = (above, "farsight") if above is not None and is_ours else (ancestor, "")
            yield top, name
            yield from ((child, "") for child in top.children(recursive=True))


def _use(process: psutil.Process, name: str) -> ProcessUse:
    try:
        with process.oneshot():
            spent, memory = process.cpu_times(), process.memory_full_info()
            return ProcessUse(process.pid, name or _name(process), spent.user + spent.system, memory.pss)
    except psutil.Error:  # the process has just ended
        return ProcessUse(process.pid, "ended", 0.0, 0)


def _name(process: psutil.Process) -> str:
    """Names a process for people, without its command line, whose arguments may be secret."""
    words: list[str] = process.cmdline()
    if words and words[0].startswith("ray::"):
        return words[0].removeprefix("ray::").partition(".")[0].split(":")[0].strip()
    ends = [word.rpartition("/")[2].rpartition("." if "services." in word else "/")[2] for word in words[:4]]
    for end in ends:
        if end in _COMMANDS:
            return end
        if end in _RAY:
            return f"Ray {_RAY[end]}"
    return str(process.name())
