"""The processors that this process may use, often fewer than the machine has, and the memory that it gives back."""

from __future__ import annotations

import ctypes
import io
import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


def usable_processors(root: Path = Path("/")) -> int:
    """Returns the number of processors that this process may use: at least 1.

    The number is the minimum of its affinity mask and of the quotas of its control groups. A fraction of a processor
    does not count: the threads of a step wait for each other, so all wait for the thread that has used up the quota.

    Args:
        root: Directory that holds ``proc`` and the mounts of the control groups; tests use another than ``/``.
    """
    # macOS has neither affinity masks nor control groups.
    quota = quota_processors(root)
    count = len(_affinity())
    return max(1, count if quota is None else min(count, int(quota)))


FEW_PROCESSORS = 3
"""Up to so many processors, all of them compute: to spare one would leave a third of the machine or more idle."""


def compute_threads(asked: int, num_sharers: int, root: Path = Path("/")) -> int:
    """Returns the number of compute threads of a worker on CPUs.

    HTTP and scheduling need a part of a processor. On 2 or 3 processors they take it from the threads of a step: with
    SmolLM2 on 2 processors, 2 threads serve 1.06, 1.26, 1.55 and 1.54 times the tokens of 1 thread at 1, 8, 32 and 128
    requests in flight. From 4 processors on one is spared: workers get 3 threads of 4, 7 of 8, 15 of 16.

    Args:
        asked: The configured number; 0 shares these processors among the workers. A worker gets no more threads than a
            NUMA node has processors: the threads of a step read the same memory, and those on another node read it
            several times as slowly.
        num_sharers: Workers on this machine.
        root: As for ``usable_processors``.
    """
    if asked:
        return asked
    usable = usable_processors(root)
    largest_node = max((len(node) for node in numa_nodes(root)), default=usable)
    computing = usable if usable <= FEW_PROCESSORS else usable - 1
    return max(1, min(computing // num_sharers, largest_node))


def encoder_threads(asked: int, root: Path = Path("/")) -> int:
    """Returns the number of compute threads of an image encoder on CPUs: half of the processors, shared with workers.

    Args:
        asked: The configured number; 0 for that half.
        root: As for ``usable_processors``.
    """
    return asked or max(1, usable_processors(root) // 2)


def numa_nodes(root: Path = Path("/")) -> list[frozenset[int]]:
    """Returns the processors that this process may use, by NUMA node; empty if the system does not tell.

    Args:
        root: As for ``usable_processors``; the affinity mask is that of this process in any case.
    """
    usable = _affinity()
    files = sorted((root / "sys/devices/system/node").glob("node[0-9]*/cpulist"))
    nodes = [_processors_of(_read(path)) & usable for path in files]
    return [frozenset(node) for node in nodes if node]


def bind_to_node(place: int, num_threads: int, root: Path = Path("/")) -> frozenset[int] | None:
    """Binds the calling thread, and threads that it starts, to the NUMA node of a worker; workers take turns at nodes.

    Memory that a thread writes first lies on its node. Nothing is bound where there is one node only, where the system
    does not tell, or where a node has fewer processors than the worker has threads.

    Args:
        place: The worker's number among the workers of this machine.
        num_threads: Its compute threads.
        root: As for ``usable_processors``.

    Returns:
        The node's processors; None if nothing was bound.
    """
    nodes = numa_nodes(root)
    if len(nodes) < 2 or len(nodes[place % len(nodes)]) < num_threads:
        return None
    node = nodes[place % len(nodes)]
    os.sched_setaffinity(0, node)
    return node


def _affinity() -> set[int]:
    """Returns the mask of the process's first thread: other threads may be bound to a part of it."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(os.getpid())
    return set(range(os.cpu_count() or 1))


def _processors_of(cpulist: str) -> set[int]:
    """Parses a list of ranges such as ``0-3,8``."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", cpulist)
    return {number for first, last in ranges for number in range(int(first), int(last or first) + 1)}


def quota_processors(root: Path = Path("/")) -> float | None:
    """Returns the CPU seconds a second that the control groups of this process grant; None if nothing limits it.

    Both versions are read: ``cpu.max`` of version 2, ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us`` of version 1. A
    group's quota bounds everything below it, so the lowest one from the process's own group up to the mount counts.

    Args:
        root: As for ``usable_processors``.
    """
    quotas = [
        quota
        for mount in _mounts(_read(root / "proc/self/mountinfo"))
        for group in _groups(mount, _read(root / "proc/self/cgroup"))
        if (quota := _quota(root / str(group).lstrip("/"))) is not None
    ]
    return min(quotas, default=None)


@dataclass(frozen=True, slots=True)
class _Mount:
    """Where a hierarchy of control groups is mounted, and from which of its groups on."""

    point: PurePosixPath
    top: PurePosixPath
    version: int


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    """Yields every mounted hierarchy that may limit processors; proc(5) describes the format of ``mountinfo``."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        point, top = PurePosixPath(_unescape(fields[4])), PurePosixPath(_unescape(fields[3]))
        if kind[0] == "cgroup2":
            yield _Mount(point, top, 2)
        elif kind[0] == "cgroup" and "cpu" in kind[2].split(","):
            yield _Mount(point, top, 1)


def _groups(mount: _Mount, memberships: str) -> Iterator[PurePosixPath]:
    """Yields the directories of the process's groups, from its own up to the mount."""
    for line in memberships.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (mount.version == 2) != (number == "0" and not controllers):
            continue
        if mount.version == 1 and "cpu" not in controllers.split(","):
            continue
        own = PurePosixPath(path)
        # A container sees its own part of the hierarchy: a path outside is not found, but the mount's top is.
        inside = own.relative_to(mount.top) if own.is_relative_to(mount.top) and ".." not in own.parts else None
        group = mount.point if inside is None else mount.point / inside
        yield group
        while group != mount.point:
            group = group.parent
            yield group


def _quota(group: Path) -> float | None:
    words = _read(group / "cpu.max").split()
    if not words:
        words = [*_read(group / "cpu.cfs_quota_us").split(), *_read(group / "cpu.cfs_period_us").split()]
    try:
        granted, period = map(float, words)
    except ValueError:  # "max", no such file, or no pair of numbers
        return None
    return granted / period if granted > 0 and period > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _unescape(text: str) -> str:
    """Replaces the octal numbers by which proc(5) writes spaces and the like."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


MAPPED_BYTES = 4 << 20
"""Size from which on a freed block goes back to the system at once; smaller blocks are used again."""

_M_MMAP_THRESHOLD = -3  # of malloc.h


def return_large_blocks() -> bool:
    """Has ``malloc`` map every block of ``MAPPED_BYTES`` or more by itself, for the rest of this process's life.

    glibc raises that bound, up to 32 MiB, with each larger block that is freed (mallopt(3), ``M_MMAP_THRESHOLD``). From
    then on blocks of that size come from the heaps of threads, which small blocks above them keep from shrinking: a
    process that handles pictures of all sizes grows long after the largest.

    Returns:
        Whether ``malloc`` does; only glibc has this call.
    """
    call = getattr(ctypes.CDLL(None), "mallopt", None)
    return call is not None and bool(call(_M_MMAP_THRESHOLD, MAPPED_BYTES))


def check_unpacked(data: bytes, max_entries: int, max_bytes: int) -> None:
    """Checks the size that a zip file states for its content, which may be a thousand times its own.

    Raises:
        ValueError: The content is larger, or the data is not a zip file.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(str(error)) from error
    size = sum(entry.file_size for entry in entries)
    if size > max_bytes or len(entries) > max_entries:
        raise ValueError(f"{len(entries)} arrays of {size} bytes; at most {max_entries} and {max_bytes} are read")
