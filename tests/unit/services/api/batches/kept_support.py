"""A real log in a file behind files and batches, without its actor."""

from __future__ import annotations

import asyncio
from pathlib import Path

from farsight.actors.log.log_backend import KeptBackend, Retention
from farsight.actors.log.log_sqlite import SqliteLog
from farsight.core.kept import (
    AddParts,
    DropExpired,
    KeptObject,
    ObjectName,
    ObjectPage,
    ObjectQuery,
    PartsPage,
    PartsQuery,
    PutObject,
    PutVerdict,
)


class SqliteObjects:
    """Opens its file when it is first asked, and counts the results of lines that are written, and what is read."""

    def __init__(self, path: Path) -> None:
        self.log = SqliteLog(path, Retention(10, 2))
        self._opened = False
        self._num_lines = 0
        self.num_reads = 0
        self._more = asyncio.Event()

    async def _kept(self) -> KeptBackend:
        if not self._opened:
            self._opened = True
            await self.log.open()
        return self.log.kept

    async def put_object(self, order: PutObject) -> PutVerdict:
        return await (await self._kept()).put(order)

    async def find_object(self, name: ObjectName) -> KeptObject | None:
        return await (await self._kept()).find(name)

    async def list_objects(self, query: ObjectQuery) -> ObjectPage:
        return ObjectPage(await (await self._kept()).list(query))

    async def drop_object(self, name: ObjectName) -> None:
        await (await self._kept()).drop(name)

    async def add_parts(self, order: AddParts) -> None:
        await (await self._kept()).add_parts(order)
        if order.kind == "lines":
            self._num_lines += len(order.parts)
            self._more.set()

    async def have_lines(self, count: int) -> None:
        """Returns when so many results are written."""
        while self._num_lines < count:
            self._more.clear()
            await self._more.wait()

    async def read_parts(self, query: PartsQuery) -> PartsPage:
        self.num_reads += 1
        return PartsPage(await (await self._kept()).parts(query))

    async def drop_expired(self, order: DropExpired) -> None:
        await (await self._kept()).drop_expired(order.now)
