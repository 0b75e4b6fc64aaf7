"""Processor time and memory of the processes of a service on this machine, by names that people know."""

from __future__ import annotations

import os
from collections.abc import Iterable

import psutil

from farsight.actors.runtime.names import RUN_DIR_VARIABLE
from farsight.core.messages.status import ProcessUse

_COMMANDS = ("template_process", "body_workers", "what_if_process", "raylet", "gcs_server", "haproxy")
_RAY = {"dashboard.py": "dashboard", "agent.py": "agent", "main.py": "runtime-env agent", "idle_agent.py": "idle agent"}
_COMMAND = "farsight"

_SHOWN_S = 0.05


def processes_here() -> tuple[ProcessUse, ...]:
    """Returns every process of the service on this node, Ray's and HAProxy among them; none outside a Ray cluster.

    The topmost is the raylet above this process; under ``farsight serve``, that command. Memory is proportional (PSS):
    shared memory is divided among its processes, so that a sum is right. The call takes a few milliseconds for each
    process.
    """
    for ancestor in psutil.Process().parents():
        if ancestor.name() == "raylet":
            # The command is the parent of the raylet and of the GCS. A raylet of another node, or of `ray start`, has
            # no such parent.
            above = ancestor.parent() if RUN_DIR_VARIABLE in os.environ else None
            if above is not None and any(child.name() == "gcs_server" for child in above.children()):
                return _uses(above, _COMMAND)
            return _uses(ancestor, "")
    return ()


def own_processes() -> tuple[ProcessUse, ...]:
    """Returns this process, which runs a command, and all its descendants."""
    return _uses(psutil.Process(), _COMMAND)


def spent(before: Iterable[ProcessUse], after: Iterable[ProcessUse]) -> str:
    """Says how many processor seconds processes took between two readings, and which took most of them.

    What a process took that ended in between is left out.
    """
    earlier = {each.pid: each.cpu_s for each in before}
    took: dict[str, float] = {}
    for each in after:
        took[each.name] = took.get(each.name, 0.0) + max(0.0, each.cpu_s - earlier.get(each.pid, 0.0))
    parts = sorted(((took_s, name) for name, took_s in took.items() if took_s >= _SHOWN_S), reverse=True)
    named = ", ".join(f"{name} {took_s:.1f}" for took_s, name in parts)
    return f"{sum(took.values()):.1f} processor seconds" + (f" ({named})" if named else "")


def _uses(top: psutil.Process, name: str) -> tuple[ProcessUse, ...]:
    return (_use(top, name), *(_use(child, "") for child in top.children(recursive=True)))


def _use(process: psutil.Process, name: str) -> ProcessUse:
    try:
        with process.oneshot():
            used, memory = process.cpu_times(), process.memory_full_info()
            return ProcessUse(process.pid, name or _name(process), used.user + used.system, memory.pss)
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
