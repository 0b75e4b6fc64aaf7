"""Kept objects in the SQLite file of the log."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import aiosqlite

from farsight.actors.log.log_backend import MAX_INDICES, within
from farsight.core.kept import (
    AddParts,
    KeptObject,
    ObjectName,
    ObjectPart,
    ObjectQuery,
    PartsQuery,
    PutObject,
    PutVerdict,
)

_COLUMNS = ", ".join(field.name for field in dataclasses.fields(KeptObject))
_MARKS = ", ".join("?" for _ in dataclasses.fields(KeptObject))
_OF_NAME = "kind = ? AND object_id = ?"
_PAGE_ROWS = 64

_Session = Callable[[], AbstractAsyncContextManager[aiosqlite.Connection]]


class KeptSqlite:
    """
    Args:
        transaction, reading: Contexts of the log that give its connection while no other operation uses it.
    """

    def __init__(self, transaction: _Session, reading: _Session) -> None:
        self._transaction = transaction
        self._reading = reading

    async def put(self, order: PutObject) -> PutVerdict:
        kept = order.kept
        async with self._transaction() as connection:
            old = await _find(connection, ObjectName(kept.kind, kept.object_id))
            revision = 0 if old is None else old.revision
            rows = await connection.execute_fetchall(
                "SELECT COALESCE(SUM(num_bytes), 0) FROM kept_objects WHERE owner = ?", (kept.owner,)
            )
            has = int(next(iter(rows))[0])
            will_have = has + kept.num_bytes - (0 if old is None else old.num_bytes)
            too_much = order.max_owner_bytes and will_have > order.max_owner_bytes and will_have > has
            if kept.revision != revision + 1 or too_much:
                return PutVerdict(False, revision, has)
            sql = f"INSERT OR REPLACE INTO kept_objects ({_COLUMNS}) VALUES ({_MARKS})"
            await connection.execute(sql, dataclasses.astuple(kept))
            return PutVerdict(True, kept.revision, will_have)

    async def find(self, name: ObjectName) -> KeptObject | None:
        async with self._reading() as connection:
            return await _find(connection, name)

    async def list(self, query: ObjectQuery) -> tuple[KeptObject, ...]:
        order, sign = ("DESC", "<") if query.newest_first else ("ASC", ">")
        sql = f"SELECT {_COLUMNS} FROM kept_objects WHERE kind = ? AND owner = ?"
        values: list[object] = [query.kind, query.owner]
        async with self._reading() as connection:
            if query.after:
                last = await _find(connection, ObjectName(query.kind, query.after))
                if last is None or last.owner != query.owner:
                    return ()
                sql += f" AND (created_at, object_id) {sign} (?, ?)"
                values += [last.created_at, last.object_id]
            sql += f" ORDER BY created_at {order}, object_id {order} LIMIT ?"
            rows = await connection.execute_fetchall(sql, (*values, query.limit))
        return tuple(KeptObject(*row) for row in rows)

    async def drop(self, name: ObjectName) -> bool:
        async with self._transaction() as connection:
            dropped = await connection.execute(
                f"DELETE FROM kept_objects WHERE {_OF_NAME}", (name.kind, name.object_id)
            )
            await connection.execute(f"DELETE FROM kept_parts WHERE {_OF_NAME}", (name.kind, name.object_id))
            return dropped.rowcount > 0

    async def add_parts(self, order: AddParts) -> None:
        async with self._transaction() as connection:
            if await _find(connection, ObjectName(order.kind, order.object_id)) is None:
                return
            sql = "INSERT OR IGNORE INTO kept_parts (kind, object_id, part, data) VALUES (?, ?, ?, ?)"
            rows = [(order.kind, order.object_id, part.index, part.data) for part in order.parts]
            await connection.executemany(sql, rows)

    async def parts(self, query: PartsQuery) -> tuple[ObjectPart, ...]:
        what, most = ("part, x''", MAX_INDICES) if query.only_indices else ("part, data", _PAGE_ROWS)
        sql = f"SELECT {what} FROM kept_parts WHERE {_OF_NAME} AND part >= ? ORDER BY part LIMIT ?"
        async with self._reading() as connection:
            rows = await connection.execute_fetchall(sql, (query.kind, query.object_id, query.first, most))
        return within([(row[0], row[1]) for row in rows], query.max_bytes)

    async def drop_expired(self, now: float) -> None:
        over = "SELECT kind, object_id FROM kept_objects WHERE expires_at > 0 AND expires_at <= ?"
        async with self._transaction() as connection:
            await connection.execute(f"DELETE FROM kept_parts WHERE (kind, object_id) IN ({over})", (now,))
            await connection.execute("DELETE FROM kept_objects WHERE expires_at > 0 AND expires_at <= ?", (now,))


async def _find(connection: aiosqlite.Connection, name: ObjectName) -> KeptObject | None:
    sql = f"SELECT {_COLUMNS} FROM kept_objects WHERE {_OF_NAME}"
    rows = list(await connection.execute_fetchall(sql, (name.kind, name.object_id)))
    return KeptObject(*rows[0]) if rows else None
