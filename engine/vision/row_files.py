"""Rows of images in files that processes of one machine map: who encodes writes them, who decodes reads them.

A file in the page cache is shared memory with a name. The encoder keeps a bounded number of them (``RowStore``). An
ingress replica holds those of its requests by hard links of its own (``RowHolder``), so that what the encoder drops
stays as long as a request needs it, and what a dead process held can be told by its name. All of a name's files are
the same rows: the name is a hash of the picture and of the salt that divides tenants. Knows no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from farsight.core.errors import InvalidValueError
from farsight.core.images import EncodedImage, ImageSpan
from farsight.engine.vision.spans import carried_rows, unpacked

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<8sIIIIQ")
_MAGIC = b"farsrows"
_KEPT, _HELD = "kept", "held"
_NAME_BYTES = 24

ORPHANED_S = 300.0
"""What a dead ingress replica held is kept for so long: its resumable streams go on elsewhere."""


def rows_name(digest: bytes, salt: str) -> str:
    """Returns the name of a picture's rows: only who has the same salt knows it."""
    return blake2b(digest, key=blake2b(salt.encode()).digest(), digest_size=_NAME_BYTES).hexdigest()


class RowStore:
    """The rows that an encoder keeps; the longest unused go first, and answers name them. One thread at a time.

    Finds what an earlier encoder has left.

    Args:
        root: A directory of the service, for its user alone.
        max_bytes: Most bytes of all rows; one picture is always kept, since its reader has yet to come.
        owner: Names the encoder among those of the service: none drops what another keeps.
    """

    def __init__(self, root: Path, max_bytes: int, owner: str) -> None:
        self._held = root / _HELD
        self._folder = root / _KEPT / owner
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[EncodedImage, int]] = OrderedDict()  # with the bytes of its rows
        self.num_bytes = 0
        for folder in (root, self._held, root / _KEPT, self._folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        for path in sorted(self._folder.iterdir(), key=lambda each: each.stat().st_mtime):
            found = _read_head(path)
            if found is None:
                path.unlink()
            else:
                self._add(*found)
        self._shrink()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, name: str) -> EncodedImage | None:
        """Returns what is kept under that name, without a digest; it is the latest used from now on."""
        if name not in self._kept:
            return None
        if not (self._folder / name).exists():
            self._forget(name)
            return None
        self._kept.move_to_end(name)
        return self._kept[name][0]

    def keep(self, name: str, image: EncodedImage) -> EncodedImage:
        """Writes an image's rows, and drops others where they are too many; returns the image with the rows' name in
        their place. An image whose rows cannot be written is returned as it is."""
        path = self._folder / name
        unfinished = path.with_name(f".{secrets.token_hex(8)}")
        height, width = image.grid or (0, 0)
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(_HEAD.pack(_MAGIC, image.num_tokens, height, width, 0, len(image.embeddings)))
                file.write(image.embeddings)
            unfinished.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            logger.warning("rows of a picture cannot be written, and go with its request: %s", error)
            return image
        named = replace(image, embeddings=b"", rows=name)
        self._add(replace(named, digest=b""), len(image.embeddings))
        self._shrink()
        return named

    def _add(self, image: EncodedImage, num_bytes: int) -> None:
        if image.rows in self._kept:
            self._forget(image.rows)
        self.num_bytes += num_bytes
        self._kept[image.rows] = image, num_bytes

    def _forget(self, name: str) -> None:
        _, num_bytes = self._kept.pop(name)
        self.num_bytes -= num_bytes

    def _shrink(self) -> None:
        while self.num_bytes > self._max_bytes and len(self._kept) > 1:
            name = next(iter(self._kept))
            self._forget(name)
            (self._folder / name).unlink(missing_ok=True)

    def sweep(self, now: float) -> None:
        """Drops what ingress replicas that are dead have held, after ``ORPHANED_S``.

        Args:
            now: Seconds since the epoch.
        """
        for folder in self._held.iterdir():
            with contextlib.suppress(FileNotFoundError):  # its owner has just ended
                if not _lives(folder.name.partition("-")[0]) and now - folder.stat().st_mtime > ORPHANED_S:
                    shutil.rmtree(folder)


def drop_rows(root: Path, owner: str) -> None:
    """Drops what an encoder that has ended has kept, if it has; what requests hold stays.

    Args:
        root, owner: As for ``RowStore``.
    """
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(root / _KEPT / owner)


class RowHolder:
    """Holds the rows that one process's requests need. One thread at a time.

    Args:
        root: As for ``RowStore``.
        owner: Names this holder among those of the process.
    """

    def __init__(self, root: Path, owner: str) -> None:
        self._root = root
        self._folder = root / _HELD / f"{os.getpid()}-{owner}"
        self._holds: Counter[str] = Counter()

    def hold(self, name: str) -> bool:
        """Returns whether the rows are there; they stay until as many ``release`` as holds."""
        if not self._holds[name] and not any(self._linked(path) for path in _places(self._root, name)):
            del self._holds[name]
            return False
        self._holds[name] += 1
        return True

    def release(self, name: str) -> None:
        """Ends one hold; after ``close`` there is none."""
        if name not in self._holds:
            return
        self._holds[name] -= 1
        if not self._holds[name]:
            del self._holds[name]
            (self._folder / name).unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._holds)

    def close(self) -> None:
        """Ends all holds."""
        self._holds.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _linked(self, path: Path) -> bool:
        for folder in (self._folder.parent.parent, self._folder.parent, self._folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        try:
            os.link(path, self._folder / path.name)
        except FileExistsError:
            return True
        except FileNotFoundError:
            return False
        os.utime(self._folder)
        return True


class SharedEmbeddings:
    """Rows that came with the request, or are in a file. ``rows`` is an ``engine.vision.spans.FindRows``.

    Args:
        root: As for ``RowStore``.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def rows(self, span: ImageSpan, hidden_size: int) -> np.ndarray:
        if not span.rows:
            return carried_rows(span, hidden_size)
        for path in _places(self._root, span.rows):
            with contextlib.suppress(FileNotFoundError):
                mapped = np.memmap(path, np.uint8, mode="r")
                return unpacked(mapped[_HEAD.size :].data, span.length, hidden_size)
        raise InvalidValueError("images.rows", span.rows, "rows that are kept until their request ends")


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _places(root: Path, name: str) -> Iterator[Path]:
    """Yields where rows of that name may be."""
    if len(name) != 2 * _NAME_BYTES or not name.isalnum():
        raise InvalidValueError("images.rows", name, "a name that `rows_name` makes")
    for kind in (_KEPT, _HELD):
        with contextlib.suppress(FileNotFoundError):  # nothing was encoded yet
            for folder in (root / kind).iterdir():
                yield folder / name


def _read_head(path: Path) -> tuple[EncodedImage, int] | None:
    """Returns a file's image and the bytes of its rows; None of a file that was not written to its end, or another."""
    with open(path, "rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or path.name.startswith("."):
        return None
    magic, num_tokens, height, width, _, num_bytes = _HEAD.unpack(head)
    if magic != _MAGIC or path.stat().st_size != _HEAD.size + num_bytes:
        return None
    return EncodedImage(b"", num_tokens, (height, width) if height else (), rows=path.name), num_bytes
