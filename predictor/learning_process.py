"""A fit in a process of its own, of low priority: whatever happens to the fit, the parent lives on.

The child sends plain bytes back over a pipe, never a pickle. With exit status 0 the bytes are the model, else the
reason of the failure.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

from farsight.core.children import end_with_parent

NICENESS = 19
"""Niceness of the child, the highest one, where there is no ``SCHED_IDLE``."""

STEPS_BACK_S = 30.0
"""Seconds after which a fit has the priority of others: where no process ever rests, nothing would be learned else."""

_PATIENCE_S = 0.05
"""Longest wait of a poll for the next chunk of a result, in seconds."""

_CHUNK = 1 << 20

Argument = TypeVar("Argument")


@dataclass(frozen=True, slots=True)
class FitEnd:
    """How a fit ended.

    Attributes:
        data: The model as bytes; None if there is none.
        error: Why there is no model, in one line.
    """

    data: bytes | None
    error: str = ""


class FitProcess:
    """``fit(argument)`` in a child process, from construction on; ``poll`` until it has ended.

    Construction returns when the child has started and read its argument, after about a second: call it from a thread
    where that matters.

    Args:
        fit: A function of a module (the child imports it by name); gives a model as bytes.
        argument: Its only argument; can be pickled.
        now: Seconds on the clock that ``poll`` is asked with.
        timeout_s: A child that takes longer is killed.
    """

    def __init__(self, fit: Callable[[Argument], bytes], argument: Argument, now: float, timeout_s: float) -> None:
        self._ends_at, self._steps_back_until = now + timeout_s, now + STEPS_BACK_S
        self._timeout_s = timeout_s
        self._received = bytearray()
        self._end: FitEnd | None = None
        context = multiprocessing.get_context("spawn")  # a fork would copy locks of threads that it has not
        self._pipe, writer = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(os.getpid(), writer, fit, argument), name="fit", daemon=True)
        try:
            self._process.start()
        except BaseException:
            self._pipe.close()
            raise
        finally:
            writer.close()  # the child has a copy; while this one is open, the pipe shows no end

    @property
    def pid(self) -> int | None:
        """Pid of the child."""
        return self._process.pid

    def poll(self, now: float) -> FitEnd | None:
        """Returns how the fit ended; None while it runs. Reads all that the child has sent in one poll."""
        if self._end is None:
            alive = self._process.is_alive()  # asked first: all that an ended child has sent can then be read
            if self._receive() or not alive:
                self._end = self._read_end()
            elif now >= self._ends_at:
                self._process.kill()
                self._end = FitEnd(None, f"the fit took longer than {self._timeout_s:g} s")
            elif now >= self._steps_back_until and sys.platform == "linux":
                self._steps_back_until = math.inf
                with contextlib.suppress(PermissionError):  # without RLIMIT_NICE only root may; others go on waiting
                    os.sched_setscheduler(self._process.pid or 0, os.SCHED_OTHER, os.sched_param(0))
            if self._end is not None:
                self._close()
        return self._end

    def stop(self) -> None:
        """Ends the fit: its result is no longer wanted."""
        if self._end is None:
            self._process.kill()
            self._end = FitEnd(None, "the fit was stopped")
            self._close()

    def _receive(self) -> bool:
        """Reads the bytes that are there or follow at once; returns whether the child has closed its end."""
        pipe = self._pipe.fileno()
        while select.select([pipe], [], [], _PATIENCE_S if self._received else 0)[0]:
            chunk = os.read(pipe, _CHUNK)
            if not chunk:
                return True
            self._received += chunk
        return False

    def _read_end(self) -> FitEnd:
        self._process.join()
        status = self._process.exitcode
        if status == 0:
            return FitEnd(bytes(self._received))
        if status is not None and status < 0:
            return FitEnd(None, f"the fit was killed by {signal.Signals(-status).name}")
        reason = self._received.decode(errors="replace").strip() or f"status {status}"
        return FitEnd(None, f"the fit failed: {reason}")

    def _close(self) -> None:
        self._process.join()
        self._process.close()
        self._pipe.close()


def give_way() -> None:
    """Gives this process only the time that no other wants, and lets each that wakes go first at once.

    A niced process may hold its core for milliseconds against a thread that wakes, as long as a step takes.
    """
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(NICENESS)


def _run(parent: int, pipe: Connection, fit: Callable[[Argument], bytes], argument: Argument) -> None:
    """Runs in the child: fits, and sends the result."""
    end_with_parent(parent)
    give_way()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its children
    status = 0
    try:
        data = fit(argument)
    except Exception as error:
        status, data = 1, traceback.format_exception_only(error)[-1].encode()
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(pipe.fileno(), rest) :]
    pipe.close()
    raise SystemExit(status)
