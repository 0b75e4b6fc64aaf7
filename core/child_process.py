"""Child processes, each on an anonymous socket. A frame is its length in 4 bytes, then so many bytes.

A ``LimitedChild`` works on data from outside: its environment holds no keys, the kernel bounds its memory and the
processor time of each answer, and it writes no file.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from io import BufferedRWPair
from typing import Any

LENGTH = struct.Struct(">I")
"""Header of a frame: the number of bytes that follow."""

ANSWER_S = 60.0
"""A limited child that does not answer within so many seconds is killed. Its limit of processor time is far shorter, so
a child that is late was not given a processor."""

_KEYLESS = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONDONTWRITEBYTECODE")
"""Variables that a limited child inherits from its parent: no keys, no tokens."""


def start_child(
    module: str, *args: str, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Runs ``python -m MODULE ARGS... SOCKET``; no other process has an end of the socket.

    Args:
        environment: Replaces this process's own. The child can import the same modules as this process.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        own = {**(os.environ if environment is None else environment)}
        own["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-m", module, *args, str(number)]
        return subprocess.Popen(command, pass_fds=(number,), env=own), ours


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def receive(stream: BufferedRWPair[Any, Any]) -> bytes | None:
    """Returns the next frame; None at the end of the connection."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = stream.read(length)
    return None if len(data) < length else data


class ChildStopped(Exception):
    """A question took too much processor time, or crashed the child; the text says which."""


class ChildLost(Exception):
    """Another process has ended the child, or the machine gave it no processor time. The question is not at fault: a
    new child may be asked."""


class LimitedChild:
    """One process and this end of its socket; both end with this object. For one thread at a time.

    Args:
        module: The module to run. Its ``main`` calls ``limit_process``, and answers within ``processor_time``.
        cpu_s: The processor time that it gives each answer; for errors.
    """

    def __init__(self, module: str, *args: str, cpu_s: float) -> None:
        environment = {name: os.environ[name] for name in _KEYLESS if name in os.environ}
        self._cpu_s = cpu_s
        self._process, self._socket = start_child(module, *args, environment=environment)
        self._socket.settimeout(ANSWER_S)
        self._stream = self._socket.makefile("rwb")
        self.end = weakref.finalize(self, _end, self._process, self._socket, self._stream)

    @property
    def has_ended(self) -> bool:
        return not self.end.alive

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, data: bytes) -> bytes:
        """Sends a frame and returns the process's answer; blocks for ``ANSWER_S`` at most.

        Either error means that the process has ended.

        Raises:
            ChildStopped: The answer took too much processor time, or the process ended by itself.
            ChildLost: Another process has ended it, or ``ANSWER_S`` have passed.
        """
        try:
            self._stream.write(LENGTH.pack(len(data)))
            self._stream.write(data)
            self._stream.flush()
            reply = receive(self._stream)
        except TimeoutError as error:
            self.end()
            raise ChildLost(f"its process did not answer within {ANSWER_S:g} s") from error
        except OSError as error:
            raise self._ended() from error
        if reply is None:
            raise self._ended()
        return reply

    def _ended(self) -> Exception:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ANSWER_S)
        code = self._process.poll()
        self.end()
        if code == -signal.SIGPROF:
            return ChildStopped(f"it was stopped after {self._cpu_s:g} s of processor time")
        if code in (-signal.SIGKILL, -signal.SIGTERM, 0):
            return ChildLost("its process was ended")
        return ChildStopped(f"its process ended with status {code}")


def _end(process: subprocess.Popen[bytes], connection: socket.socket, stream: BufferedRWPair[Any, Any]) -> None:
    with contextlib.suppress(OSError):  # unsent data is lost
        stream.close()
    connection.close()
    process.kill()
    process.wait()


@contextlib.contextmanager
def parent_stream() -> Iterator[BufferedRWPair[Any, Any]]:
    """Opens the child's end of its socket, whose number is the last argument."""
    with socket.socket(fileno=int(sys.argv[-1])) as connection, connection.makefile("rwb") as stream:
        yield stream


def limit_process(more_bytes: int, *, opens_files: bool = True) -> None:
    """Bounds this process for the rest of its life: no core dump, nothing written to a file.

    Args:
        more_bytes: Memory that it may take beside its present memory.
        opens_files: Whether it may open anything further, be it to read, or a socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # other systems have neither the file nor the limit
        with open("/proc/self/statm", encoding="ascii") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    if not opens_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


@contextlib.contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """Lets the kernel end this process if the body takes more than ``seconds`` of processor time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
