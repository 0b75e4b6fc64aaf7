"""Simulates what would have become of a request, in a process of its own: one question at a time, within bounds.

The kernel ends the process when a question has taken ``MOST_CPU_S`` of processor time, and refuses it memory beyond
``MOST_BYTES``. It writes no file, its environment holds no keys, and it keeps nothing from one question to the next.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading

from core.codec import decode, encode
from core.errors import FarsightError
from core.messages.log import WhatIfAnswer, WhatIfQuestion
from services.api.child_process import LENGTH, framed, start_child

MOST_CPU_S = 10.0
"""Processor time of one question."""

ANSWER_S = 60.0
"""A process that does not answer for so long is ended, whatever it has computed."""

MOST_BYTES = 1 << 30
"""Memory of the process beyond what it has when it starts."""

_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONDONTWRITEBYTECODE")


class WhatIfProcess:
    """A child that is started with the first question and ends with this process. For one thread at a time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def ask(self, question: WhatIfQuestion) -> WhatIfAnswer:
        """Blocks until the answer.

        Raises:
            FarsightError: It took too much time or memory, or its process was ended.
        """
        with self._turn:
            connection = self._ready()
            try:
                connection.sendall(framed(encode(question)))
                data = _receive(connection)
            except OSError:
                data = None
            if data is None:
                self._end()
                raise FarsightError(f"the simulation was stopped: it may take {MOST_CPU_S:g} s of processor time")
            return decode(data, WhatIfAnswer)

    def close(self) -> None:
        """Ends the child."""
        with self._turn:
            self._end()

    def _ready(self) -> socket.socket:
        if self._socket is None:
            environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            self._child, self._socket = start_child(__spec__.name, environment=environment)
            self._socket.settimeout(ANSWER_S)
        return self._socket

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._child = self._socket = None


def _receive(connection: socket.socket) -> bytes | None:
    """The next frame; None at the end of the connection."""
    head = _read(connection, LENGTH.size)
    return None if head is None else _read(connection, LENGTH.unpack(head)[0])


def _read(connection: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data))
        if not more:
            return None
        data += more
    return bytes(data)


def _limit() -> None:
    """No core dump, no file, and no more memory than now and ``MOST_BYTES``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # other systems have neither the file nor the limit
        with open("/proc/self/statm", encoding="ascii") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    """``python -m services.api.pages.what_if_process SOCKET``"""
    from simulator.logged import answer

    _limit()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        while (asked := _receive(connection)) is not None:
            signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
            try:
                found = answer(decode(asked, WhatIfQuestion))
            except (FarsightError, MemoryError) as error:
                found = WhatIfAnswer(problem=str(error) or "it needs too much memory")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0.0)
            connection.sendall(framed(encode(found)))


if __name__ == "__main__":
    main()
