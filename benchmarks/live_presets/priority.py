"""Gives a live run priority over other work on the machine, which would make its timers late."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def before_others() -> Iterator[None]:
    """Runs the calling thread, and threads that it starts, before all non-real-time work (Linux, SCHED_RR).

    Raises:
        PermissionError: Only root may do that.
    """
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def can_come_first() -> bool:
    """Whether this process may call ``before_others``."""
    if not hasattr(os, "sched_setscheduler"):
        return False
    try:
        with before_others():
            return True
    except PermissionError:
        return False
