"""A model directory is data from elsewhere: which of its files are read, and how much of them."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from farsight.core.errors import InvalidValueError

MAX_TEXT = 1 << 24
"""Longest JSON file or template, in bytes; the longest real ones are indexes of some 9 MB."""


def model_file(folder: Path, name: str) -> Path | None:
    """A file of a model directory; None if there is none.

    Links may lead to other files of the directory. In the cache of the Hugging Face hub, whose directories are links
    to its blobs, they may lead to anything of the same repository.

    Raises:
        InvalidValueError: Something else of that name: a link out of the directory or to nothing, a folder, a device.
    """
    path = folder / name
    field = f"model: {name}"
    try:
        place = path.resolve(strict=True)
        root = _root(folder.resolve(strict=True))
        if not place.is_relative_to(root):
            expected = "a file in the model directory: put the file itself there, or name the directory that it is in"
            raise InvalidValueError(field, f"{path} -> {place}", expected)
        if not stat.S_ISREG(place.stat().st_mode):
            raise InvalidValueError(field, str(path), "a regular file")
    except FileNotFoundError:
        if not path.is_symlink():
            return None
        raise InvalidValueError(field, f"{path} -> {path.readlink()}", "a link to a file that exists") from None
    except (OSError, RuntimeError) as error:  # Python 3.11 and 3.12 report a cycle by RuntimeError
        raise InvalidValueError(field, str(path), f"a readable file ({_reason(error)})") from error
    return path


def read_text(path: Path) -> str:
    """A text file of a model directory.

    Raises:
        InvalidValueError: It is too long, or not in UTF-8.
    """
    size = path.stat().st_size
    if size > MAX_TEXT:
        raise InvalidValueError(str(path), f"{size} bytes", f"at most {MAX_TEXT} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise InvalidValueError(str(path), str(error), "text in UTF-8") from error


def read_json_file(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        InvalidValueError: It is too long, not JSON, or nested too deeply.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(str(path), str(error), "a JSON file") from error


def _root(folder: Path) -> Path:
    in_hub_cache = folder.parent.name == "snapshots" and (folder.parents[1] / "blobs").is_dir()
    return folder.parents[1] if in_hub_cache else folder


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or "links that lead in a circle"
