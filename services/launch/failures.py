"""What a command prints of its failure, and of the lines that the processes of a private cluster send."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from farsight.actors.runtime.log_lines import FORMATS, MAX_LINE, SOCKET_NAME, log_fields
from farsight.core.errors import FarsightError, InvalidValueError
from farsight.services.launch.stages import StartTimedOut
from farsight.services.run_file import make_run_directory

_LONGEST_LINE = 400
_LONGEST_LOG = 200_000
"""Characters; the end of a traceback says more than its beginning."""


@contextlib.contextmanager
def failing_in_lines(command: str) -> Iterator[None]:
    """Ends the command with status 1 when it fails; prints what ``describe`` returns, and no traceback.

    Args:
        command: Name of the command, such as ``serve``.

    Raises:
        typer.Exit: The command failed.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, typer.Exit | typer.Abort):
            raise
        for line in describe(error, command, write_log):
            typer.echo(f"farsight: {line}", err=True)
        raise typer.Exit(1) from error


def describe(error: Exception, command: str, write: Callable[[str, str], Path | None]) -> list[str]:
    """Returns the error as a line; a second line only says what the error does not say itself.

    Args:
        write: A function like ``write_log``.
    """
    told = isinstance(error, InvalidValueError)  # It names what would be right; a traceback adds nothing.
    expected = isinstance(error, FarsightError)
    what = str(error) if expected else f"{command} ended by an unexpected {type(error).__name__}: {error}"
    path = None
    if not told and not (expected and error.__cause__ is None and not hasattr(error, "__notes__")):
        path = write(command, "".join(traceback.format_exception(error)))
    more = []
    if isinstance(error, StartTimedOut):
        more.append("end other programs, or raise server.start_patience_s in --config, and run the same command again")
    if path is not None:
        more.append(f"read the details of the failure in {path}")
    return [_one_line(what), *([f"What to do: {'; '.join(more)}."] if more else [])]


def write_log(command: str, text: str) -> Path | None:
    """Writes the details of a failure to a file that only its user can read, replacing the last one; None if it cannot.

    The file holds a traceback and the last lines of Ray's own logs, which contain no request.
    """
    try:
        path = make_run_directory() / f"failed-{command}.log"
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text[-_LONGEST_LOG:])
    except (OSError, FarsightError):
        return None  # The printed line matters most.
    return path


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."


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
        record = logging.LogRecord("farsight.services.launch", logging.INFO, "", 0, line, None, None)
        say(FORMATS[log_format](log_fields(record, PROCESS)))

    return say_fields
