"""Reads workload files, compressed with gzip or not."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from core.errors import InvalidValueError

_GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def open_lines(field: str, path: Path) -> Iterator[TextIO]:
    """The lines of a file.

    Args:
        field: The option that named the file.

    Raises:
        InvalidValueError: The file cannot be read.
    """
    try:
        with path.open("rb") as probe:
            packed = probe.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        opener: Callable[..., TextIO] = gzip.open if packed else open
        with opener(path, "rt", encoding="utf-8", newline="") as lines:
            yield lines
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidValueError(field, str(path), f"a readable file of UTF-8 text ({error})") from error
