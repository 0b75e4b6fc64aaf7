"""What clients leave with the service, in each kind of storage: revisions, quotas, pages, parts, expiry."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from farsight.actors.log.log_backend import KeptBackend, LogBackend, Retention
from farsight.actors.log.log_redis import RedisLog
from farsight.actors.log.log_sqlite import SqliteLog
from farsight.core.kept import AddParts, KeptObject, ObjectName, ObjectPart, ObjectQuery, PartsQuery, PutObject


@pytest.fixture
async def kept(path: str) -> AsyncIterator[KeptBackend]:
    retention = Retention(10, 2)
    log: LogBackend = RedisLog(path, retention) if "://" in path else SqliteLog(Path(path), retention)
    await log.open()
    yield log.kept
    await log.close()


def _object(name: str, owner: str = "a", created_at: float = 1.0, size: int = 10, revision: int = 1) -> KeptObject:
    return KeptObject("file", name, owner, created_at, 0.0, revision, size, b"{}")


async def test_a_change_of_another_than_the_last_revision_is_refused(kept: KeptBackend) -> None:
    first = _object("f")
    assert (await kept.put(PutObject(first))).stored
    verdict = await kept.put(PutObject(first))
    assert (verdict.stored, verdict.revision) == (False, 1)
    second = dataclasses.replace(first, revision=2, record=b"second", num_bytes=3)
    assert (await kept.put(PutObject(second))).owner_bytes == 3
    assert not (await kept.put(PutObject(dataclasses.replace(second, record=b"other")))).stored
    assert await kept.find(ObjectName("file", "f")) == second
    assert await kept.find(ObjectName("batch", "f")) is None


async def test_an_owner_has_no_more_than_the_quota(kept: KeptBackend) -> None:
    assert (await kept.put(PutObject(_object("f", size=60), 100))).stored
    refused = await kept.put(PutObject(_object("g", size=41), 100))
    assert (refused.stored, refused.owner_bytes) == (False, 60)
    assert (await kept.put(PutObject(_object("g", owner="b", size=41), 100))).stored
    smaller = _object("f", size=5, revision=2)
    assert (await kept.put(PutObject(smaller, 1))).stored, "what takes less room is never refused"
    assert await kept.drop(ObjectName("file", "f"))
    assert not await kept.drop(ObjectName("file", "f"))
    assert (await kept.put(PutObject(_object("h", size=100), 100))).stored


async def test_pages_of_one_owner(kept: KeptBackend) -> None:
    for number in range(5):
        await kept.put(PutObject(_object(f"f{number}", created_at=float(number // 2))))
    await kept.put(PutObject(_object("other", owner="b")))

    async def names(**fields: object) -> list[str]:
        query = dataclasses.replace(ObjectQuery("file", "a", 3), **fields)  # type: ignore[arg-type]
        return [each.object_id for each in await kept.list(query)]

    assert await names() == ["f0", "f1", "f2"]
    assert await names(after="f2") == ["f3", "f4"]
    assert await names(newest_first=True, after="f3") == ["f2", "f1", "f0"]
    assert await names(after="other") == []
    assert await names(after="unknown") == []


async def test_a_part_is_written_once_and_only_for_an_object(kept: KeptBackend) -> None:
    await kept.add_parts(AddParts("file", "f", (ObjectPart(0, b"lost"),)))
    await kept.put(PutObject(_object("f")))
    await kept.add_parts(AddParts("file", "f", (ObjectPart(2, b"c" * 8), ObjectPart(0, b"a" * 8))))
    await kept.add_parts(AddParts("file", "f", (ObjectPart(2, b"again"), ObjectPart(1, b"b" * 8))))

    async def parts(first: int, max_bytes: int) -> list[tuple[int, bytes]]:
        return [(each.index, each.data) for each in await kept.parts(PartsQuery("file", "f", first, max_bytes))]

    assert await parts(0, 100) == [(0, b"a" * 8), (1, b"b" * 8), (2, b"c" * 8)]
    assert await parts(0, 16) == [(0, b"a" * 8), (1, b"b" * 8)]
    assert await parts(1, 1) == [(1, b"b" * 8)]
    assert await parts(3, 100) == []
    indices = await kept.parts(PartsQuery("file", "f", 1, 0, only_indices=True))
    assert [each.index for each in indices] == [1, 2]
    await kept.drop(ObjectName("file", "f"))
    await kept.put(PutObject(_object("f")))
    assert await parts(0, 100) == []


async def test_what_has_expired_goes_with_its_parts(kept: KeptBackend) -> None:
    for name, expires_at in (("old", 5.0), ("new", 15.0), ("ever", 0.0)):
        await kept.put(PutObject(dataclasses.replace(_object(name), expires_at=expires_at)))
        await kept.add_parts(AddParts("file", name, (ObjectPart(0, b"x"),)))
    await kept.drop_expired(10.0)
    assert [each.object_id for each in await kept.list(ObjectQuery("file", "a", 10))] == ["ever", "new"]
    assert await kept.parts(PartsQuery("file", "old", 0, 100)) == ()
    assert (await kept.put(PutObject(_object("more", size=81), 100))).stored is False
    assert (await kept.put(PutObject(_object("more", size=80), 100))).stored
