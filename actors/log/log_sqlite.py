"""The log in a SQLite file."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite

from farsight.actors.log.kept_sqlite import KeptSqlite
from farsight.actors.log.log_backend import (
    MAX_INT,
    RECORD_KINDS,
    Record,
    Retention,
    trace_range,
    values,
    version_refused,
    version_unknown,
)
from farsight.actors.log.log_sqlite_schema import APPLICATION_ID, SQL_SCHEMA_VERSION, STEPS
from farsight.core.errors import ConfigError
from farsight.core.messages.log import (
    Artefact,
    ArtefactInfo,
    BatchPage,
    ExamplePage,
    FinishedBatch,
    FinishedRequest,
    ForecastRecord,
    LoggedExample,
    LogPage,
    LogQuery,
    RequestTrace,
)

_TABLES: dict[type[Record], str] = {
    ForecastRecord: "forecasts",
    FinishedRequest: "finished_requests",
    FinishedBatch: "finished_batches",
    RequestTrace: "traces",
}


def _columns(kind: type, table: str = "") -> str:
    return ", ".join(f"{table}{field.name}" for field in dataclasses.fields(kind))


def _insert(kind: type, table: str) -> str:
    marks = ", ".join("?" for _ in dataclasses.fields(kind))
    return f"INSERT OR IGNORE INTO {table} ({_columns(kind)}) VALUES ({marks})"


_INSERTS = {kind: _insert(kind, table) for kind, table in _TABLES.items()}
_LAST_ROW = "SELECT seq FROM sqlite_sequence WHERE name = ?"
_NUM_REQUEST_COLUMNS = len(dataclasses.fields(FinishedRequest))
_QUANTILES = [field.name for field in dataclasses.fields(ForecastRecord)].index("quantiles")
_ENDED = [field.name for field in dataclasses.fields(RequestTrace)].index("ended")

# CROSS JOIN forces this join order, so that the cost of a page is proportional to its size.
_SELECT_EXAMPLES = f"""
SELECT examples.row, {_columns(FinishedRequest, "r.")}, {_columns(ForecastRecord, "f.")}
FROM examples CROSS JOIN finished_requests AS r USING (request_id) CROSS JOIN forecasts AS f USING (request_id)
WHERE examples.row > ? ORDER BY examples.row LIMIT ?"""

# The newest versions are kept, and the current one.
_DROP_ARTEFACTS = """
DELETE FROM artefacts WHERE kind = :kind
AND version NOT IN (SELECT version FROM artefacts WHERE kind = :kind ORDER BY version DESC LIMIT :keep)
AND version IS NOT (SELECT current_version FROM artefact_kinds WHERE kind = :kind)"""

_LIST_ARTEFACTS = """
SELECT kind, version, created_at, score, num_examples, note, LENGTH(data), version IS current_version
FROM artefacts JOIN artefact_kinds USING (kind) ORDER BY kind, version"""

T = TypeVar("T")
_Row = Sequence[Any]


class SqliteLog:
    """The log in one file, with one connection and one writer.

    WAL with ``synchronous=FULL`` syncs at every commit: neither ``kill -9`` nor a power cut loses a committed record.

    Two ``SqliteLog`` objects must not write to one file: each counts only its own rows and would drop too few.
    """

    errors: tuple[type[Exception], ...] = (sqlite3.Error,)

    def __init__(self, path: Path, retention: Retention) -> None:
        self._path = path.absolute()  # ":memory:" and "" mean something else to SQLite
        self._retention = retention
        self._connection: aiosqlite.Connection | None = None
        self._lock = asyncio.Lock()  # so that a reader sees no row before its commit
        self._num_rows: dict[type[Record], int] = {}
        self.kept = KeptSqlite(self._transaction, self._reading)

    async def open(self) -> None:
        try:
            self._connection = await _open(self._path)
            for kind, table in _TABLES.items():
                self._num_rows[kind] = await _scalar(self._connection, f"SELECT COUNT(*) FROM {table}")
        except sqlite3.Error as error:
            await self.close()
            expected = f"a log of Farsight or a path for a new one ({error})"
            raise ConfigError("log.path", str(self._path), expected) from error

    async def close(self) -> None:
        async with self._lock:
            if self._connection is not None:
                await self._connection.close()
                self._connection = None

    async def write(self, records: Sequence[Record]) -> dict[str, int]:
        counts = dict(self._num_rows)
        added: dict[str, int] = {}
        async with self._transaction() as connection:
            for kind, name in RECORD_KINDS.items():
                rows = [_parameters(record) for record in records if type(record) is kind]
                num_new = (await connection.executemany(_INSERTS[kind], rows)).rowcount if rows else 0
                surplus = max(counts[kind] + num_new - self._retention.max_rows, 0)
                if surplus:
                    await connection.execute(_drop_oldest(_TABLES[kind]), (surplus,))
                counts[kind] += num_new - surplus
                added[name] = num_new
        self._num_rows = counts
        return added

    async def read_requests(self, query: LogQuery) -> LogPage:
        return LogPage(*await self._read(FinishedRequest, query, "finished_requests"))

    async def read_batches(self, query: LogQuery) -> BatchPage:
        return BatchPage(*await self._read(FinishedBatch, query, "finished_batches"))

    async def read_examples(self, query: LogQuery) -> ExamplePage:
        return ExamplePage(*await self._page(_SELECT_EXAMPLES, "examples", query, _example))

    async def read_traces(self, response_id: str) -> tuple[RequestTrace, ...]:
        sql = f"SELECT {_columns(RequestTrace)} FROM traces WHERE trace_id >= ? AND trace_id < ? ORDER BY trace_id"
        async with self._reading() as connection:
            rows = await connection.execute_fetchall(sql, trace_range(response_id))
        return tuple(_trace(tuple(row)) for row in rows)

    async def put_artefact(self, artefact: Artefact) -> bool:
        kind, version = artefact.kind, artefact.version
        async with self._transaction() as connection:
            if await self._find(connection, kind, version) == artefact:
                return False
            sql = "SELECT last_version FROM artefact_kinds WHERE kind = ?"
            last_version = await _scalar(connection, sql, (kind,))
            if version <= last_version:
                raise version_refused(version, last_version)
            await connection.execute(
                "INSERT INTO artefact_kinds (kind, last_version) VALUES (?, ?) "
                "ON CONFLICT (kind) DO UPDATE SET last_version = excluded.last_version",
                (kind, version),
            )
            await connection.execute(_insert(Artefact, "artefacts"), values(artefact))
            await self._drop_artefacts(connection, kind)
        return True

    async def set_current(self, kind: str, version: int) -> None:
        async with self._transaction() as connection:
            sql = "SELECT COUNT(*) FROM artefacts WHERE kind = ? AND version = ?"
            if not await _scalar(connection, sql, (kind, version)):
                raise version_unknown(kind, version)
            sql = "UPDATE artefact_kinds SET current_version = ? WHERE kind = ?"
            await connection.execute(sql, (version, kind))
            await self._drop_artefacts(connection, kind)

    async def artefact(self, kind: str, version: int | None) -> Artefact | None:
        async with self._reading() as connection:
            return await self._find(connection, kind, version)

    async def artefacts(self) -> tuple[ArtefactInfo, ...]:
        async with self._reading() as connection:
            rows = await connection.execute_fetchall(_LIST_ARTEFACTS)
        return tuple(ArtefactInfo(*(*row[:-1], bool(row[-1]))) for row in map(tuple, rows))

    async def num_bytes(self) -> int:
        async with self._reading() as connection:
            return await _scalar(connection, "PRAGMA page_count") * await _scalar(connection, "PRAGMA page_size")

    async def _read(self, kind: type[T], query: LogQuery, table: str) -> tuple[int, tuple[T, ...]]:
        sql = f"SELECT row, {_columns(kind)} FROM {table} WHERE row > ? ORDER BY row LIMIT ?"
        return await self._page(sql, table, query, lambda row: kind(*row))

    async def _page(
        self, sql: str, table: str, query: LogQuery, make: Callable[[_Row], T]
    ) -> tuple[int, tuple[T, ...]]:
        """Reads a page: its last row and its records, which ``make`` builds from the columns after the row number."""
        async with self._reading() as connection:
            rows = list(await connection.execute_fetchall(sql, (min(query.after_row, MAX_INT), query.limit)))
            written = await _scalar(connection, _LAST_ROW, (table,))
        last_row = rows[-1][0] if rows else min(query.after_row, written)
        return last_row, tuple(make(row[1:]) for row in rows)

    async def _find(self, connection: aiosqlite.Connection, kind: str, version: int | None) -> Artefact | None:
        if version is None:
            sql = "SELECT current_version FROM artefact_kinds WHERE kind = ?"
            version = await _scalar(connection, sql, (kind,))  # 0, which is no version, if none is current
        sql = f"SELECT {_columns(Artefact)} FROM artefacts WHERE kind = ? AND version = ?"
        rows = list(await connection.execute_fetchall(sql, (kind, version)))
        return Artefact(*rows[0]) if rows else None

    async def _drop_artefacts(self, connection: aiosqlite.Connection, kind: str) -> None:
        await connection.execute(_DROP_ARTEFACTS, {"kind": kind, "keep": self._retention.max_artefacts})

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[aiosqlite.Connection]:
        async with self._lock:
            if self._connection is None:
                raise sqlite3.ProgrammingError("the file is closed")
            yield self._connection

    @contextlib.asynccontextmanager
    async def _transaction(self) -> AsyncIterator[aiosqlite.Connection]:
        async with self._reading() as connection:
            try:
                await connection.execute("BEGIN IMMEDIATE")
                yield connection
                await connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    await connection.rollback()
                raise


async def _open(path: Path) -> aiosqlite.Connection:
    """Connects to the log at ``path``; creates a missing file and leaves a foreign file unchanged."""
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
    """Migrates an empty file or a log of an earlier version in one transaction; refuses other files."""
    await connection.execute("BEGIN IMMEDIATE")
    application_id = await _scalar(connection, "PRAGMA application_id")
    version = await _scalar(connection, "PRAGMA user_version")
    empty = await _scalar(connection, "SELECT COUNT(*) FROM sqlite_schema") == 0
    if not (empty and application_id == 0 and version == 0):
        if application_id != APPLICATION_ID:
            raise ConfigError("log.path", str(path), "a log of Farsight; the file is another program's database")
        if not 1 <= version <= SQL_SCHEMA_VERSION:
            expected = f"a log of version {SQL_SCHEMA_VERSION} or earlier; the file has version {version}"
            raise ConfigError("log.path", str(path), expected)
    for version_made, statements in enumerate(STEPS[version:], version + 1):
        for statement in (*statements, f"PRAGMA user_version = {version_made}"):
            await connection.execute(statement)
    await connection.execute("COMMIT")


async def _scalar(connection: aiosqlite.Connection, sql: str, parameters: Sequence[Any] = ()) -> int:
    """Returns the number that ``sql`` selects; 0 for no row or NULL."""
    rows = list(await connection.execute_fetchall(sql, parameters))
    return int(rows[0][0] or 0) if rows else 0


def _drop_oldest(table: str) -> str:
    return f"DELETE FROM {table} WHERE row IN (SELECT row FROM {table} ORDER BY row LIMIT ?)"


def _parameters(record: Record) -> _Row:
    """Returns the parameters with which a record is inserted."""
    row = values(record)
    if isinstance(record, ForecastRecord):
        return *row[:_QUANTILES], json.dumps(row[_QUANTILES]), *row[_QUANTILES + 1 :]
    return row


def _trace(row: _Row) -> RequestTrace:
    fields = list(row)
    fields[_ENDED] = bool(fields[_ENDED])
    return RequestTrace(*fields)


def _example(row: _Row) -> LoggedExample:
    finished, forecast = row[:_NUM_REQUEST_COLUMNS], list(row[_NUM_REQUEST_COLUMNS:])
    forecast[_QUANTILES] = tuple(json.loads(forecast[_QUANTILES]))
    return LoggedExample(FinishedRequest(*finished), ForecastRecord(*forecast))
