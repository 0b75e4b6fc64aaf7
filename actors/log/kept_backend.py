"""The interface of the storage of kept objects, beside the log's own records."""

from __future__ import annotations

from typing import Protocol

from core.kept import (
    AddParts,
    KeptObject,
    ObjectName,
    ObjectPart,
    ObjectQuery,
    PartsQuery,
    PutObject,
    PutVerdict,
)


class KeptBackend(Protocol):
    """Every operation takes effect as a whole or not at all, and is durable when it returns."""

    async def put(self, order: PutObject) -> PutVerdict:
        """Stores an object or its next revision."""

    async def find(self, name: ObjectName) -> KeptObject | None: ...

    async def list(self, query: ObjectQuery) -> tuple[KeptObject, ...]: ...

    async def drop(self, name: ObjectName) -> bool:
        """Drops an object with its parts; returns whether the object was there."""

    async def add_parts(self, order: AddParts) -> None: ...

    async def parts(self, query: PartsQuery) -> tuple[ObjectPart, ...]: ...

    async def drop_expired(self, now: float) -> None: ...


MAX_INDICES = 1_000_000
"""Most parts of one page without data."""


def within(rows: list[tuple[int, bytes]], max_bytes: int) -> tuple[ObjectPart, ...]:
    """Returns the first parts that together have at most ``max_bytes``; at least one part if there is any."""
    found: list[ObjectPart] = []
    total = 0
    for index, data in rows:
        total += len(data)
        if found and total > max_bytes:
            break
        found.append(ObjectPart(index, data))
    return tuple(found)
