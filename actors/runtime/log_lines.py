"""Lines of the service's log: each process sends its own to the process of ``farsight serve``, which prints them.

A line holds what a component reports about itself, never a prompt or an answer: an exception appears with its type and
place, not with its message, which may quote a client's text.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from farsight.actors.runtime.names import RUN_DIR_VARIABLE

OURS = "farsight"
"""Logger above all loggers of Farsight, which send lines."""

SOCKET_NAME = "log.sock"
MAX_LINE = 8192
"""Most characters of a line; the rest of a longer line is left out."""

_MAX_MESSAGE = 2000


def log_fields(record: logging.LogRecord, process: str) -> dict[str, Any]:
    """Returns the fields of a line, in order; the fields of ``extra={"fields": {...}}`` come last."""
    fields: dict[str, Any] = {
        "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "process": process,
        "logger": record.name,
        "message": record.getMessage()[:_MAX_MESSAGE],
    }
    if record.exc_info and record.exc_info[0] is not None:
        fields["exception"] = record.exc_info[0].__name__
        frames = traceback.extract_tb(record.exc_info[2])
        if frames:
            fields["raised_at"] = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    return fields | getattr(record, "fields", {})


def as_json(fields: Mapping[str, Any]) -> str:
    """Formats one line as JSON; control characters, which a terminal would obey, are escaped."""
    return json.dumps(fields)[:MAX_LINE]


def as_text(fields: Mapping[str, Any]) -> str:
    """Formats one line as text: time, level, process, message, then the other fields as ``name=value``."""
    known = ("at", "level", "process", "logger", "message")
    others = "".join(f" {name}={value}" for name, value in fields.items() if name not in known)
    line = f"{fields['at'][11:23]} {fields['level']} {fields['process']}: {fields['message']}{others}"
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)[:MAX_LINE]


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"text": as_text, "json": as_json}


class LineHandler(logging.Handler):
    """Sends each line to the socket in the directory of a private cluster, else to stderr; never waits for a reader.

    A reader that is behind loses lines; the next line that reaches it has the number of lost lines (``lost``).

    Args:
        process: Name of this process in its lines.
        log_format: ``text`` or ``json``.
        directory: The cluster's directory; None where this process belongs to no private cluster.
    """

    def __init__(self, process: str, log_format: str, directory: Path | None) -> None:
        super().__init__()
        self._process = process
        self._format = FORMATS[log_format]
        self._path = None if directory is None else str(directory / SOCKET_NAME)
        self._lost = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields = log_fields(record, self._process)
            line = self._format(fields | {"lost": self._lost} if self._lost else fields)
        except Exception:  # as the standard library's handlers do: a wrong call of a logger ends no request
            self.handleError(record)
            return
        if self._path is None:
            sys.stderr.write(f"{line}\n")
            return
        try:
            self._socket.sendto(line.encode("utf-8", "replace"), self._path)
        except OSError:  # there is no reader, or the reader is behind
            self._lost += 1
        else:
            self._lost = 0

    def close(self) -> None:
        self._socket.close()
        super().close()


def send_log_lines(process: str, log_format: str, log_level: str = "warning") -> None:
    """Makes Farsight's loggers of this process send their lines from a level on; replaces an earlier setting."""
    send_no_log_lines()
    directory = os.environ.get(RUN_DIR_VARIABLE)
    handler = LineHandler(process, log_format, Path(directory) if directory else None)
    logger = logging.getLogger(OURS)
    logger.addHandler(handler)
    logger.setLevel(log_level.upper())


def send_no_log_lines() -> None:
    """Undoes ``send_log_lines``."""
    logger = logging.getLogger(OURS)
    logger.setLevel(logging.NOTSET)
    for handler in [each for each in logger.handlers if isinstance(each, LineHandler)]:
        logger.removeHandler(handler)
        handler.close()
