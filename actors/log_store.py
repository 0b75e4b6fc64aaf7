"""The log of finished requests: a SQLite file that loses nothing it has acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiosqlite
from prometheus_client import CollectorRegistry, Counter

from actors.piece import Piece, PieceContext
from core.codec import decode, encode
from core.errors import ConfigError, FarsightError, MessageError
from core.messages import FinishedRequest, FinishedRequests, LogPage, LogQuery

SQL_SCHEMA_VERSION = 1
"""``PRAGMA user_version`` of the file; raised when the table changes."""

APPLICATION_ID = 0x46415253
"""``PRAGMA application_id`` of the file: "FARS"."""

FILE_NAME = "farsight-log.sqlite"
RUN_DIR_VARIABLE = "FARSIGHT_RUN_DIR"

MAX_PAGE = 10_000
"""Records in one ``LogPage``, whatever was asked for."""

_MAX_INT = 2**63 - 1
"""The largest integer of SQLite."""

# AUTOINCREMENT: a row number is never given twice, also after the newest rows have been deleted.
_CREATE = """
CREATE TABLE finished_requests (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    request_id TEXT NOT NULL UNIQUE,
    replica TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    prompt_len INTEGER NOT NULL,
    output_len INTEGER NOT NULL,
    max_new_tokens INTEGER NOT NULL,
    finish_reason TEXT NOT NULL,
    received_at REAL NOT NULL,
    ttft_s REAL,
    jct_s REAL NOT NULL
)"""

_FIELDS = tuple(field.name for field in dataclasses.fields(FinishedRequest))
_COLUMNS = ", ".join(_FIELDS)
_INSERT = f"INSERT OR IGNORE INTO finished_requests ({_COLUMNS}) VALUES ({', '.join('?' * len(_FIELDS))})"
_SELECT = f"SELECT row, {_COLUMNS} FROM finished_requests WHERE row > ? ORDER BY row LIMIT ?"
_LAST_ROW = "SELECT seq FROM sqlite_sequence WHERE name = 'finished_requests'"
_COUNT = "SELECT COUNT(*) FROM finished_requests"
_DROP_OLDEST = "DELETE FROM finished_requests WHERE row IN (SELECT row FROM finished_requests ORDER BY row LIMIT ?)"

_Values = tuple[Any, ...]
"""A record as the parameters of ``_INSERT``."""


class LogStore(Piece):
    """Writes finished requests and gives them to the learners in order of writing.

    One connection, one writer: what arrives while a commit is under way goes into the next one together, so many
    ingress replicas share the price of a sync to disk. WAL with ``synchronous=FULL`` syncs at every commit: neither
    ``kill -9`` nor a power cut loses a record that was acknowledged.

    Two stores may not write to one file: each would count its own rows only, and drop too few.
    """

    kind = "LogStore"

    def __init__(self, context: PieceContext) -> None:
        super().__init__(context)
        self._max_rows = context.config.log.max_rows
        self._private_dir: str | None = None
        self._connection: aiosqlite.Connection | None = None
        self._lock = asyncio.Lock()
        self._inbox: asyncio.Queue[tuple[list[_Values], asyncio.Future[None]]] = asyncio.Queue()
        self._closing = False
        self._num_rows = 0
        self._queue = 0
        self._appended_at: float | None = None
        self._counter = _counter(context.registry)

    async def start(self) -> None:
        """Opens the file, or makes it.

        Raises:
            ConfigError: the path cannot be opened or is not a log of this version.
        """
        path = self._path()
        try:
            self._connection = await _open(path)
        except sqlite3.Error as error:
            raise ConfigError("log.path", str(path), f"a log of Farsight or a path for a new one ({error})") from error
        self._num_rows = await _scalar(self._connection, _COUNT)
        self.spawn(self._write())

    async def stop(self) -> None:
        """Writes what it has been given and closes the file."""
        self._closing = True
        await self._inbox.join()
        await super().stop()
        if self._connection is not None:
            async with self._lock:
                await self._connection.close()
                self._connection = None
        if self._private_dir is not None:
            shutil.rmtree(self._private_dir, ignore_errors=True)

    @property
    def queue(self) -> int:
        return self._queue

    @property
    def last_step_age_s(self) -> float | None:
        return None if self._appended_at is None else time.monotonic() - self._appended_at

    async def append(self, data: bytes) -> bytes:
        """Takes ``FinishedRequests``; answers, with nothing, when they are on disk.

        A request that is already in the log is passed over, so a message whose answer was lost may be repeated.

        Raises:
            MessageError: a number that SQLite cannot hold; nothing of the message is written.
            FarsightError: the disk refuses, or the store is closed; nothing of the message is written.
        """
        rows = [_values(record) for record in decode(data, FinishedRequests).records]
        if self._connection is None or self._closing:
            raise FarsightError(f"{self.name} is closed")
        if rows:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._inbox.put_nowait((rows, done))
            self._queue += len(rows)
            await done
        return b""

    async def read(self, data: bytes) -> bytes:
        """Takes ``LogQuery``; answers with ``LogPage``, of at most ``MAX_PAGE`` records.

        Where there is nothing after ``after_row``, ``last_row`` is ``after_row``, but never beyond the last row ever
        written: a reader that is ahead of the log sees so that the log has lost rows, and one that asks from
        ``2**63 - 1`` learns where the log ends.

        Raises:
            FarsightError: the file cannot be read, or the store is closed.
        """
        query = decode(data, LogQuery)
        limit = min(max(query.limit, 0), MAX_PAGE)
        async with self._lock, self._database("read") as connection:  # the lock: no row before its commit
            rows = list(await connection.execute_fetchall(_SELECT, (min(query.after_row, _MAX_INT), limit)))
            written = await _scalar(connection, _LAST_ROW)
        last_row = rows[-1][0] if rows else min(query.after_row, written)
        return encode(LogPage(last_row, tuple(FinishedRequest(*row[1:]) for row in rows)))

    def _path(self) -> Path:
        if self.context.config.log.path:
            # absolute: ":memory:" and "" mean something else to SQLite
            return Path(self.context.config.log.path).absolute()
        directory = os.environ.get(RUN_DIR_VARIABLE)
        if not directory:
            directory = self._private_dir = tempfile.mkdtemp(prefix="farsight-")
        return Path(directory) / FILE_NAME

    @contextlib.asynccontextmanager
    async def _database(self, verb: str) -> AsyncIterator[aiosqlite.Connection]:
        """The connection; what goes wrong with it is told as a FarsightError."""
        if self._connection is None:
            raise FarsightError(f"{self.name} is closed")
        try:
            yield self._connection
        except sqlite3.Error as error:
            raise FarsightError(f"{self.name} cannot {verb}: {error}") from error

    async def _write(self) -> None:
        """Commits what has come in, all of it at once, again and again."""
        while True:
            batch = [await self._inbox.get()]
            while not self._inbox.empty():
                batch.append(self._inbox.get_nowait())
            failure: str | None = None
            try:
                await self._commit([row for rows, _ in batch for row in rows])
            except Exception as error:  # whatever it is: the writer lives on, and those who wait hear of it
                failure = str(error)
            for rows, done in batch:
                self._queue -= len(rows)
                self._inbox.task_done()
                if done.done():  # its caller has been cancelled
                    continue
                if failure is None:
                    done.set_result(None)
                else:
                    done.set_exception(FarsightError(failure))

    async def _commit(self, rows: list[_Values]) -> None:
        async with self._lock, self._database("write") as connection:
            try:
                await connection.execute("BEGIN IMMEDIATE")
                inserted = (await connection.executemany(_INSERT, rows)).rowcount
                surplus = max(self._num_rows + inserted - self._max_rows, 0)
                if surplus:
                    await connection.execute(_DROP_OLDEST, (surplus,))
                await connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    await connection.rollback()
                raise
        self._num_rows += inserted - surplus
        self._appended_at = time.monotonic()
        self._counter.inc(inserted)


@functools.cache
def _counter(registry: CollectorRegistry) -> Counter:
    """One a registry: a store may be stopped and another one started in the same process."""
    return Counter("farsight:log_records", "Finished requests written.", registry=registry)


async def _open(path: Path) -> aiosqlite.Connection:
    """A connection to the log at ``path``, which is made if it is not there; a foreign file stays as it is."""
    connection = await aiosqlite.connect(path, isolation_level=None)
    try:
        await _prepare(connection, path)
        await connection.execute("PRAGMA journal_mode = WAL")
        await connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        await connection.close()  # its thread would keep the process alive
        raise
    return connection


async def _prepare(connection: aiosqlite.Connection, path: Path) -> None:
    """Makes the table in an empty file and refuses what is not ours, in one transaction."""
    await connection.execute("BEGIN IMMEDIATE")
    application_id = await _scalar(connection, "PRAGMA application_id")
    version = await _scalar(connection, "PRAGMA user_version")
    empty = await _scalar(connection, "SELECT COUNT(*) FROM sqlite_schema") == 0
    if empty and application_id == 0 and version == 0:
        await connection.execute(_CREATE)
        await connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        await connection.execute(f"PRAGMA user_version = {SQL_SCHEMA_VERSION}")
    elif application_id != APPLICATION_ID:
        raise ConfigError("log.path", str(path), "a log of Farsight, but this is another program's database")
    elif version != SQL_SCHEMA_VERSION:
        raise ConfigError("log.path", str(path), f"a log of version {SQL_SCHEMA_VERSION}, but this is of {version}")
    await connection.execute("COMMIT")


async def _scalar(connection: aiosqlite.Connection, sql: str) -> int:
    """The one number that ``sql`` selects; 0 if there is no row."""
    rows = list(await connection.execute_fetchall(sql))
    return int(rows[0][0]) if rows else 0


def _values(record: FinishedRequest) -> _Values:
    values = tuple(getattr(record, name) for name in _FIELDS)
    for name, value in zip(_FIELDS, values, strict=True):
        if type(value) is int and abs(value) > _MAX_INT:
            raise MessageError(f"FinishedRequests.records.{name}", value, "an integer of 64 bits")
    return values
