"""The progress of a batch, kept in a file beside its output so that the next run resumes a killed one.

``OUT.partial`` has a header line with the SHA-256 of the input, then one output line for each finished request, in
the order in which they finished. A line counts once its newline is written. The run that writes the file holds its
lock. When every request has its line, the run writes all lines to ``OUT`` in the order of the input.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from farsight.core.errors import FarsightError, IntegrityError, InvalidValueError
from farsight.services.api.batches.lines import Batch, BatchLine, LineResult, read_result

FORMAT_VERSION = 1
LOCK_WAIT_S = 10.0
"""Seconds to wait for a run that was just killed to end."""

_LOCK_POLL_S = 0.05


class ProgressStore(contextlib.AbstractContextManager["ProgressStore"]):
    """The results of one batch; create it with ``open`` and close it at the end."""

    def __init__(self, target: Path, batch: Batch, fd: int) -> None:
        self._target = target
        self._partial = partial_path(target)
        self._batch = batch
        self._fd = fd
        self._ids = {line.custom_id for line in batch.lines}
        self._spans: dict[str, tuple[int, int]] = {}
        self._size = 0
        self._num_failed = 0
        # A cancelled run may close the store while a thread is still writing.
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def open(cls, target: Path, batch: Batch, *, overwrite: bool = False, lock_wait_s: float = 0.0) -> ProgressStore:
        """Begins a batch, or resumes one that ended early.

        Args:
            target: The output, ``OUT``.
            overwrite: Whether a finished output may be replaced.
            lock_wait_s: Seconds to wait for the lock; a run that was just killed may take a moment to end.

        Raises:
            InvalidValueError: The output exists already, or cannot be written, or the progress beside it belongs
            to another input.
            FarsightError: Another run is writing to this output.
        """
        _check_target(target, batch)
        partial = partial_path(target)
        fd = _open_locked(partial, lock_wait_s)
        store = cls(target, batch, fd)
        try:
            with _naming(partial):
                store._load(overwrite)
        except BaseException:
            os.close(fd)
            raise
        return store

    @property
    def num_done(self) -> int:
        """The number of requests that have a result, from this run or an earlier one."""
        return len(self._spans)

    @property
    def num_failed(self) -> int:
        """The number of results that are failures."""
        return self._num_failed

    def left(self) -> list[BatchLine]:
        """Returns the lines without a result."""
        return [line for line in self._batch.lines if line.custom_id not in self._spans]

    def append(self, results: Sequence[LineResult]) -> None:
        """Adds results of lines that are ``left`` and returns when they are on disk. May be called from any thread.

        Raises:
            FarsightError: The write failed; earlier results stay valid.
        """
        with self._lock, _naming(self._partial):
            if self._closed:
                return  # The run was cancelled while this thread waited.
            size = self._size
            spans: dict[str, tuple[int, int]] = {}
            for result in results:
                spans[result.custom_id] = (size, len(result.data))
                size += len(result.data)
            try:
                _write_at(self._fd, b"".join(result.data for result in results), self._size)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._size)
                raise
            self._size = size
            self._spans.update(spans)
            self._num_failed += sum(result.failed for result in results)

    def finish(self) -> None:
        """Writes the complete output in the order of the input and removes the progress file. The lock stays.

        Raises:
            IntegrityError: A request has no result.
            FarsightError: The output cannot be written; the progress is kept.
        """
        if left := self.left():
            raise IntegrityError(f"{len(left)} of {len(self._ids)} requests have no result")
        temporary = self._target.with_name(f"{self._target.name}.tmp")
        with self._lock, _naming(self._target):
            with temporary.open("wb") as file:
                for line in self._batch.lines:
                    file.write(self._read(line.custom_id))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._target)
            _sync_directory(self._target)
            # Killed before this line: the next run finds complete progress and writes the same output again.
            self._partial.unlink()
            _sync_directory(self._target)

    def remove_if_empty(self) -> None:
        """Removes the progress file if it holds no result; for a check that no run follows. Close the store next."""
        if not self._spans:
            self._partial.unlink()

    def close(self) -> None:
        """Releases the lock; appended results stay on disk."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _load(self, overwrite: bool) -> None:
        header = _header(self._batch)
        with open(self._fd, "rb", closefd=False) as file:
            first = file.readline()
            if first != header:
                self._begin(first, header, overwrite)
                return
            self._size = len(header)
            for raw in file:
                result = read_result(raw)
                # Lines after a torn or damaged line are not trusted either; their requests run again.
                if result is None or result.custom_id not in self._ids or result.custom_id in self._spans:
                    break
                self._spans[result.custom_id] = (self._size, len(raw))
                self._size += len(raw)
                self._num_failed += result.failed
        os.ftruncate(self._fd, self._size)

    def _begin(self, found: bytes, header: bytes, overwrite: bool) -> None:
        """Starts a new progress file, unless the file holds more than a torn header of Farsight's."""
        if not header.startswith(found):
            self._refuse_foreign(found)
        if self._target.exists() and not overwrite:
            self._partial.unlink()
            expected = "a path without a file (this batch is finished, or another file is there); --overwrite"
            raise InvalidValueError(f"OUT {self._target}", "an existing file", f"{expected} runs it and replaces that")
        os.ftruncate(self._fd, 0)
        _write_at(self._fd, header, 0)
        _sync_directory(self._partial)
        self._size = len(header)

    def _refuse_foreign(self, found: bytes) -> None:
        try:
            version = json.loads(found)["farsight_batch"]
        except (ValueError, KeyError, TypeError):
            what = "a file that farsight batch did not write"
        else:
            what = "progress on another input" if version == FORMAT_VERSION else f"progress in format {version!r}"
        expected = f"progress on {self._batch.path} as it is now; delete {self._partial} to start over, or choose"
        raise InvalidValueError(str(self._partial), what, f"{expected} another OUT")

    def _read(self, custom_id: str) -> bytes:
        offset, length = self._spans[custom_id]
        data = os.pread(self._fd, length, offset)
        if len(data) != length:
            raise IntegrityError(f"{self._partial} has lost bytes {offset} to {offset + length} while it was in use")
        return data


def partial_path(target: Path) -> Path:
    """The path of the progress file of an output."""
    return target.with_name(f"{target.name}.partial")


def _check_target(target: Path, batch: Batch) -> None:
    if target.is_dir():
        raise InvalidValueError("OUT", str(target), "a file, not a directory")
    if not target.parent.is_dir():
        raise InvalidValueError("OUT", str(target), f"a file in a directory that exists; {target.parent} does not")
    if target.exists() and target.samefile(batch.path):
        raise InvalidValueError("OUT", str(target), "another file than IN")


def _open_locked(partial: Path, wait_s: float) -> int:
    """Opens the file and takes its lock.

    Between opening and locking, the run that held the lock may finish and remove the file. Then the lock is on a
    deleted file, and the next try sees the result of that run.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise InvalidValueError("OUT", str(partial), f"a file that can be written ({error.strerror})") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(fd, partial):
                return fd
        except BlockingIOError:
            os.close(fd)
            if time.monotonic() >= deadline:
                message = f"{partial}: another run is writing to this file; wait until it ends or choose another OUT"
                raise FarsightError(message) from None
            time.sleep(_LOCK_POLL_S)
            continue
        except OSError as error:
            os.close(fd)
            raise FarsightError(f"{partial}: the file system refused the lock ({error.strerror})") from error
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _header(batch: Batch) -> bytes:
    """The header line: the same bytes for the same input, so that a torn header is recognised by its beginning."""
    return json.dumps({"farsight_batch": FORMAT_VERSION, "input_sha256": batch.sha256}).encode() + b"\n"


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
    os.fsync(fd)


def _sync_directory(path: Path) -> None:
    """Syncs the directory, so that the creation, renaming or removal of a file survives a crash."""
    fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turns an ``OSError`` into a FarsightError."""
    try:
        yield
    except OSError as error:
        raise FarsightError(f"{path}: {error.strerror}; run the same command again to resume") from error
