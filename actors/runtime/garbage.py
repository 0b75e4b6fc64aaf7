"""When a process with an event loop looks for cyclic garbage: not in the middle of a burst.

A full collection looks at every object, some 200 of them for each open request: with 5,000 requests open it holds the
event loop for 150 ms of CPU time, and Python begins one whenever the objects have grown by a quarter, which in a burst
is all the time. So full collections come when little is open, or after ``LATEST_S``.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

YOUNG_OBJECTS = 2000
YOUNG_COLLECTIONS = 10
"""Objects between two collections of the youngest, and so many of these until their survivors are looked at too: some
3 ms for 20,000 objects."""

_NEVER = 1_000_000_000

LOOK_S = 5.0
LATEST_S = 60.0


def leave_full_collections_to_us() -> None:
    """From now on Python collects only young objects by itself; what is there now is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, _NEVER)


def is_due(waited_s: float, quiet: bool) -> bool:
    """Whether to look at everything, so long after the last time."""
    grown = gc.get_count()[2] > 0  # some objects have outlived the young collections since
    return grown and (quiet or waited_s >= LATEST_S)


async def collect_when_quiet(quiet: Callable[[], bool]) -> None:
    """Looks for garbage from time to time; never ends.

    Args:
        quiet: Whether little would wait meanwhile.
    """
    waited_s = 0.0
    while True:
        await asyncio.sleep(LOOK_S)
        waited_s += LOOK_S
        if is_due(waited_s, quiet()):
            gc.collect()
            waited_s = 0.0
