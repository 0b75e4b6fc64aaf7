"""A process's report to its watcher, which ends the process if it makes no progress."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThreadClock:
    """A reading of a thread's progress, comparable with later readings of the same thread.

    Attributes:
        effort_s: Seconds that it has computed, or waited for a processor.
        runnable: Whether it computes, or waits for a processor or the disk, now.
    """

    effort_s: float
    runnable: bool


@dataclass(frozen=True, slots=True)
class Work:
    """The unit of work that a component is doing.

    Attributes:
        name: Name of the component.
        count: Rises with each unit of work; while it stays the same, the same unit is in progress.
        bound_s: Seconds that this unit may take.
        clock: Reading of the thread that does the work; None if it is not known.
    """

    name: str
    count: int
    bound_s: float
    clock: ThreadClock | None


@dataclass(frozen=True, slots=True)
class ProcessLife:
    """Identifies a process, so that the watcher never inspects or ends a later process with the same pid.

    Attributes:
        node_id: The node's id in Ray.
        began: Its start in clock ticks since the machine's boot; 0 where the system does not tell.
        thread_id: The system's id of the thread whose event loop answers.
    """

    node_id: str
    pid: int
    began: int
    thread_id: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """Host -> its watcher: sign of life, and the work in progress of its components; idle components are left out.

    Attributes:
        starting: Whether a component still loads what it works with.
    """

    life: ProcessLife
    work: tuple[Work, ...]
    starting: bool = False
