"""Keeps full garbage collections out of bursts, in a process with an event loop.

A full collection looks at every object, some 200 of them for each open request: with 5,000 requests open it holds the
event loop for 150 ms of CPU time. Python begins a full collection whenever the number of objects has grown by a
quarter, which in a burst is all the time. So full collections run when little is open, or after ``LATEST_S``.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

YOUNG_OBJECTS = 2000
YOUNG_COLLECTIONS = 10
"""New objects between two collections of the youngest generation, and such collections between two of the middle
generation: some 3 ms for 20,000 objects."""

_NEVER = 1_000_000_000

LOOK_S = 5.0
LATEST_S = 60.0


def leave_full_collections_to_us() -> None:
    """Restricts Python's own collections to young objects; present objects are never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, _NEVER)


def is_due(waited_s: float, quiet: bool) -> bool:
    """Returns whether a full collection is due, ``waited_s`` seconds after the last one."""
    grown = gc.get_count()[2] > 0  # some objects have outlived the young collections since
    return grown and (quiet or waited_s >= LATEST_S)


async def collect_when_quiet(quiet: Callable[[], bool]) -> None:
    """Runs full collections when they are due; never returns.

    Args:
        quiet: Returns whether few requests would wait meanwhile.
    """
    waited_s = 0.0
    while True:
        await asyncio.sleep(LOOK_S)
        waited_s += LOOK_S
        if is_due(waited_s, quiet()):
            gc.collect()
            waited_s = 0.0
