"""Processes that compute for this one and end with it, however it ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from types import FrameType

_LOOK_S = 0.1
_INIT = 1
"""Pid of the process that adopts orphans, unless another process has asked to."""


def end_with_parent(parent: int | None = None) -> None:
    """Makes this process end as soon as its parent is gone, with status 1.

    The kernel's own signal (``PR_SET_PDEATHSIG``) follows the thread that started this process, which may end long
    before the parent does. So a thread checks the parent's pid ten times a second.

    Args:
        parent: The parent's pid, if this process knows it: then it also ends if the parent was gone before this call.
    """
    expected = os.getppid() if parent is None else parent

    def watch() -> None:
        never = threading.Event()
        while os.getppid() == expected and (parent is not None or expected != _INIT):
            never.wait(_LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@contextmanager
def worker_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that compute side by side. The main thread enters this context.

    When an exception leaves the context, Ctrl-C and SIGTERM included, the processes are killed and waiting calls are
    dropped. If this process is killed, the others end by themselves.

    Args:
        jobs: Number of processes.

    Raises:
        SystemExit: This process received SIGTERM.
    """
    context = get_context("spawn")  # a fork would copy locks of threads that it has not
    with _terminating():
        pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(os.getpid(),))
        try:
            yield pool
        except BaseException:
            for process in list(pool._processes.values()):
                process.kill()
            pool.shutdown(cancel_futures=True)
            raise
        pool.shutdown()


@contextmanager
def _terminating() -> Iterator[None]:
    """Turns SIGTERM into SystemExit, so that ``finally`` clauses run."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _begin(parent: int) -> None:
    """Prepares a process of a pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to this process too; its parent ends it
    end_with_parent(parent)
