"""What a process says of itself to its watcher, which ends it where it does not go on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThreadClock:
    """What a thread has done so far; comparable with later readings of the same thread.

    Attributes:
        effort_s: For how long it has computed, or waited for a processor.
        runnable: Whether it does one of the two now.
    """

    effort_s: float
    runnable: bool


@dataclass(frozen=True, slots=True)
class Work:
    """What a component is at.

    Attributes:
        name: Of the component.
        count: Goes up with each unit of work; while it stays, the same one is under way.
        bound_s: So long that unit may take.
        clock: Of the thread that does it; None if nothing is known of that.
    """

    name: str
    count: int
    bound_s: float
    clock: ThreadClock | None


@dataclass(frozen=True, slots=True)
class ProcessLife:
    """Which process it is, so that the right one is looked at and ended, and no later one with its number.

    Attributes:
        node_id: Of Ray.
        began: When it was started, in clock ticks since its machine was; 0 where the system does not tell.
        thread_id: Of the thread whose event loop answers, as the system counts threads.
    """

    node_id: str
    pid: int
    began: int
    thread_id: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """Host -> who watches it: it answers, and what its components are at; those that wait for work are left out."""

    life: ProcessLife
    work: tuple[Work, ...]
