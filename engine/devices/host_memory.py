"""How much of the machine's memory a pool may take."""

from __future__ import annotations

from pathlib import Path

import psutil

_CONTAINER = Path("/sys/fs/cgroup")


def available_bytes(container: Path = _CONTAINER) -> int:
    """Returns the bytes that can be had without swapping: those of files that were read and can be dropped included.

    Args:
        container: Where the kernel shows the limit of this process's container (cgroup v2).
    """
    return max(0, min(int(psutil.virtual_memory().available), _within(container)))


def _within(container: Path) -> int:
    """Returns what a container's limit leaves; without a limit, more than any machine has."""
    try:
        limit, used = ((container / name).read_text("ascii").strip() for name in ("memory.max", "memory.current"))
        lines = (container / "memory.stat").read_text("ascii").splitlines()
    except OSError:
        return 1 << 62
    if limit == "max":
        return 1 << 62
    cached = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return int(limit) - int(used) + cached
