"""Prints the lines that the processes of a private cluster send."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from actors.runtime.log_lines import FORMATS, MAX_LINE, SOCKET_NAME, log_fields

PROCESS = "serve"
"""Name of the process of ``farsight serve`` in its lines."""

_LOOK_S = 0.2


def print_line(line: str) -> None:
    """Writes a line to stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def printed_log_lines(directory: Path, show: Callable[[str], None] = print_line) -> Iterator[None]:
    """Prints what processes send to the socket in that directory, for as long as the context lasts.

    The directory belongs to this user alone, so no other user's process can send.
    """
    over = threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(directory / SOCKET_NAME))
        receiver.settimeout(_LOOK_S)
        reader = threading.Thread(target=_print, args=(receiver, over, show), name="log lines", daemon=True)
        reader.start()
        try:
            yield
        finally:
            over.set()
            reader.join()
            (directory / SOCKET_NAME).unlink(missing_ok=True)


def _print(receiver: socket.socket, over: threading.Event, show: Callable[[str], None]) -> None:
    while True:
        try:
            line = receiver.recv(4 * MAX_LINE)
        except TimeoutError:
            if over.is_set():
                return
            continue
        if line:
            show(line.decode("utf-8", "replace"))


def in_format(say: Callable[[str], None], log_format: str) -> Callable[[str], None]:
    """``say`` for the lines of a start: as they are, or as lines of a JSON log."""
    if log_format == "text":
        return say

    def say_fields(line: str) -> None:
        record = logging.LogRecord("services.launch", logging.INFO, "", 0, line, None, None)
        say(FORMATS[log_format](log_fields(record, PROCESS)))

    return say_fields
