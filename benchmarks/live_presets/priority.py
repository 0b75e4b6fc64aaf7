"""A live run before other work on the machine, which would make its timers late."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def before_others() -> Iterator[None]:
    """The calling thread, and those that it starts, run before all that is not real-time (Linux, SCHED_RR).

    Raises:
        PermissionError: only root may ask for that.
    """
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def can_come_first() -> bool:
    """Whether ``before_others`` is allowed here."""
    if not hasattr(os, "sched_setscheduler"):
        return False
    try:
        with before_others():
            return True
    except PermissionError:
        return False
