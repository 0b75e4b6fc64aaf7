"""What files and batches are kept in, and files on it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from farsight.core.config.server import FilesConfig
from farsight.core.errors import FarsightError
from farsight.core.kept import (
    AddParts,
    DropExpired,
    KeptObject,
    ObjectName,
    ObjectPage,
    ObjectPart,
    ObjectQuery,
    PartsPage,
    PartsQuery,
    PutObject,
    PutVerdict,
)
from farsight.services.api.errors import ApiError

FILE, BATCH, RUN, LINES = "file", "batch", "run", "lines"
"""Kinds of kept objects: a file; a batch; that a batch is still to be run, and by whom; results of its lines so far."""

PART_BYTES = 1 << 20
UPLOADING_S = 3600.0
"""An upload that has not ended after so long is dropped."""

MAX_FILENAME_BYTES = 255


class ObjectStore(Protocol):
    """The log store, as ``actors.calls.log_store`` describes it. Every method may raise FarsightError."""

    async def put_object(self, order: PutObject) -> PutVerdict: ...
    async def find_object(self, name: ObjectName) -> KeptObject | None: ...
    async def list_objects(self, query: ObjectQuery) -> ObjectPage: ...
    async def drop_object(self, name: ObjectName) -> None: ...
    async def add_parts(self, order: AddParts) -> None: ...
    async def read_parts(self, query: PartsQuery) -> PartsPage: ...
    async def drop_expired(self, order: DropExpired) -> None: ...


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What is kept of a file beside its content.

    Attributes:
        whole: Whether all of its content is there.
    """

    filename: str
    purpose: str
    num_bytes: int
    whole: bool = False


class Files:
    """The files of all clients. A file of another owner is one that does not exist.

    Args:
        clock: Unix seconds.
    """

    def __init__(self, store: ObjectStore, settings: FilesConfig, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.settings = settings
        self.now = clock

    async def create(
        self, owner: str, filename: str, purpose: str, data: bytes, expires_s: float | None = None
    ) -> KeptObject:
        """Keeps a new file; raises ApiError (413) if the owner's quota is used up."""
        now = self.now()
        file_id = f"file-{secrets.token_hex(12)}"
        expires_at = now + min(expires_s or self.settings.max_age_s, self.settings.max_age_s)
        return await self.write(file_id, owner, FileRecord(filename, purpose, len(data)), _chunks(data), expires_at)

    async def write(
        self,
        file_id: str,
        owner: str,
        record: FileRecord,
        chunks: AsyncIterable[bytes],
        expires_at: float,
        *,
        bounded: bool = True,
    ) -> KeptObject:
        """Writes a file; one that an earlier try with the same content has begun goes on from there.

        Args:
            bounded: Whether the quota holds.

        Raises:
            ApiError: 413: the owner's quota is used up.
        """
        now, most = self.now(), self.settings.max_owner_bytes if bounded else 0
        begun = KeptObject(FILE, file_id, owner, now, now + UPLOADING_S, 1, record.num_bytes, _pack(record))
        verdict = await self.store.put_object(PutObject(begun, most))
        if not verdict.stored and not verdict.revision:
            raise over_quota(verdict.owner_bytes, record.num_bytes, most)
        if verdict.revision == 1:
            num_bytes = index = 0
            async for part in _parts(chunks):
                await self.store.add_parts(AddParts(FILE, file_id, (ObjectPart(index, part),)))
                index, num_bytes = index + 1, num_bytes + len(part)
            packed = _pack(replace(record, num_bytes=num_bytes, whole=True))
            whole = replace(begun, expires_at=expires_at, revision=2, num_bytes=num_bytes, record=packed)
            await self.store.put_object(PutObject(whole))
        return await self.find(owner, file_id)

    async def owned(self, kind: str, owner: str, object_id: str, field: str = "") -> KeptObject:
        """Returns a kept object; raises ApiError (404), which names the field, if the owner has none of that id."""
        kept = await self.store.find_object(ObjectName(kind, object_id))
        if kept is None or kept.owner != owner or self._is_over(kept):
            raise not_found(kind, object_id, field)
        return kept

    async def find(self, owner: str, file_id: str) -> KeptObject:
        """Returns a file; raises ApiError (404) if the owner has no such file."""
        kept = await self.owned(FILE, owner, file_id)
        if not file_record(kept).whole:
            raise not_found(FILE, file_id)
        return kept

    async def list(
        self, owner: str, limit: int, *, after: str = "", newest_first: bool = True
    ) -> tuple[KeptObject, ...]:
        query = ObjectQuery(FILE, owner, limit, newest_first, after)
        found = (await self.store.list_objects(query)).objects
        return tuple(kept for kept in found if file_record(kept).whole and not self._is_over(kept))

    async def content(self, owner: str, file_id: str) -> AsyncGenerator[bytes, None]:
        """The bytes of a file, part by part.

        Raises:
            FarsightError: A part is not there: the file was deleted meanwhile.
        """
        kept = await self.find(owner, file_id)
        left, index = file_record(kept).num_bytes, 0
        while left > 0:
            page = (await self.store.read_parts(PartsQuery(FILE, file_id, index, PART_BYTES))).parts
            if not page or page[0].index != index:
                raise FarsightError(f"{file_id} was deleted while it was read")
            for part in page:
                yield part.data
                left -= len(part.data)
                index = part.index + 1

    async def read(self, owner: str, file_id: str) -> bytes:
        """The whole content."""
        return b"".join([part async for part in self.content(owner, file_id)])

    async def delete(self, owner: str, file_id: str) -> None:
        """Deletes a file; raises as ``find``."""
        await self.find(owner, file_id)
        await self.store.drop_object(ObjectName(FILE, file_id))

    def _is_over(self, kept: KeptObject) -> bool:
        return 0 < kept.expires_at <= self.now()


async def _chunks(data: bytes) -> AsyncGenerator[bytes, None]:
    yield data


async def _parts(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The same bytes in parts of ``PART_BYTES``; the last may be shorter."""
    kept = bytearray()
    async for chunk in chunks:
        kept += chunk
        while len(kept) >= PART_BYTES:
            yield bytes(kept[:PART_BYTES])
            del kept[:PART_BYTES]
    if kept:
        yield bytes(kept)


def file_record(kept: KeptObject) -> FileRecord:
    return FileRecord(**json.loads(kept.record))


def _pack(record: FileRecord) -> bytes:
    return json.dumps(asdict(record)).encode()


def file_reply(kept: KeptObject) -> dict[str, Any]:
    """A file as OpenAI shows it."""
    record = file_record(kept)
    return {
        "id": kept.object_id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": int(kept.created_at),
        "expires_at": int(kept.expires_at) or None,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def not_found(kind: str, object_id: str, field: str = "") -> ApiError:
    """The error for an id that is not the caller's, whosever it is.

    Args:
        field: Where it was written; empty for ``KIND_id``.
    """
    message = f"{field or kind}: got {object_id[:100]!r}, expected the id of a {kind} of yours"
    return ApiError(message, status=404, param=field or f"{kind}_id", code=f"{kind}_not_found")


def over_quota(has: int, more: int, most: int) -> ApiError:
    message = f"file: got {more} bytes beside the {has} that your files have, expected at most {most} together"
    return ApiError(message, status=413, param="file", code="quota_exceeded")
