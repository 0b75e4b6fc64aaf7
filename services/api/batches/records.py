"""A batch: what is kept of it, and how OpenAI shows it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from farsight.core.kept import KeptObject, ObjectName, ObjectQuery, PutObject
from farsight.services.api.batches.files import BATCH, LINES, RUN, Files, not_found
from farsight.services.api.batches.responses import StoredResponses
from farsight.services.api.errors import ApiError

WINDOW_S = 24 * 3600.0
ENDED = ("failed", "completed", "expired", "cancelled")

Metadata = dict[str, str]


BATCH_TIER = "flex"
"""The ``service_tier`` of a request of a batch: it takes what the others leave."""


@dataclass(frozen=True, slots=True)
class BatchError:
    """Why an input cannot be run; ``line`` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """
    Attributes:
        status: As OpenAI names it; ``ENDED`` are the last ones.
        times: Unix seconds by the name of their field, such as ``completed_at``.
        total, completed, failed: Lines.
        output_id, error_id: Ids of the files that it will have; shown once they are there.
        has_output, has_errors: Whether they are.
        output_age_s: Seconds that these are kept.
    """

    endpoint: str
    input_file_id: str
    status: str = "validating"
    metadata: Metadata | None = None
    times: dict[str, float] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: tuple[BatchError, ...] = ()
    output_id: str = ""
    error_id: str = ""
    has_output: bool = False
    has_errors: bool = False
    output_age_s: float = 0.0

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def at(self, name: str, now: float) -> BatchRecord:
        """With this status since ``now``."""
        return replace(self, status=name, times={**self.times, f"{name}_at": now})


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch with what it is kept under."""

    kept: KeptObject
    record: BatchRecord


def unpack(kept: KeptObject) -> StoredBatch:
    fields = json.loads(kept.record)
    fields["errors"] = tuple(BatchError(**each) for each in fields["errors"])
    return StoredBatch(kept, BatchRecord(**fields))


def pack(record: BatchRecord) -> bytes:
    return json.dumps(asdict(record)).encode()


class Batches:
    """The batches of all clients. A batch of another owner is one that does not exist.

    Attributes:
        files, responses: What else is kept for clients.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self.store = files.store
        self.responses = StoredResponses(files)

    async def create(
        self, owner: str, endpoint: str, input_file_id: str, metadata: Metadata | None, output_age_s: float | None
    ) -> StoredBatch:
        """Keeps a new batch, which will be run; raises ApiError (404) if the owner has no such file."""
        await self.files.find(owner, input_file_id)
        now, token = self.files.now(), secrets.token_hex(12)
        most = self.files.settings.max_age_s
        record = BatchRecord(
            endpoint,
            input_file_id,
            metadata=metadata,
            output_id=f"file-{token}out",
            error_id=f"file-{token}err",
            output_age_s=min(output_age_s or most, most),
        )
        name = f"batch_{token}"
        # The run first: a batch without one would never begin, and a run without its batch is dropped.
        await self.store.put_object(PutObject(KeptObject(RUN, name, "", now, 0.0, 1, 0, b"{}")))
        kept = KeptObject(BATCH, name, owner, now, now + WINDOW_S + most, 1, 0, pack(record))
        await self.store.put_object(PutObject(kept))
        return StoredBatch(kept, record)

    async def find(self, owner: str, batch_id: str) -> StoredBatch:
        """Returns a batch; raises ApiError (404) if the owner has no such batch."""
        return unpack(await self.files.owned(BATCH, owner, batch_id))

    async def look(self, batch_id: str) -> StoredBatch | None:
        """A batch of any owner."""
        kept = await self.store.find_object(ObjectName(BATCH, batch_id))
        return None if kept is None else unpack(kept)

    async def list(self, owner: str, limit: int, after: str = "") -> tuple[StoredBatch, ...]:
        page = await self.store.list_objects(ObjectQuery(BATCH, owner, limit, newest_first=True, after=after))
        return tuple(map(unpack, page.objects))

    async def change(self, batch_id: str, how: Callable[[BatchRecord], BatchRecord | None]) -> StoredBatch | None:
        """Changes a batch, though others may do so at the same time; None if it has been deleted.

        Args:
            how: Called with the newest record, perhaps several times; None leaves it.
        """
        while True:
            found = await self.look(batch_id)
            if found is None:
                return None
            changed = how(found.record)
            if changed is None or changed == found.record:
                return found
            kept = replace(found.kept, revision=found.kept.revision + 1, record=pack(changed))
            if (await self.store.put_object(PutObject(kept))).stored:
                return StoredBatch(kept, changed)

    async def cancel(self, owner: str, batch_id: str) -> StoredBatch:
        """Begins to end a batch; raises ApiError: 404 if the owner has no such batch, 409 if it has ended."""
        await self.find(owner, batch_id)

        def cancelled(record: BatchRecord) -> BatchRecord | None:
            if record.ended or record.status == "finalizing":
                message = f"batch_id: the batch is {record.status}, expected one that is not"
                raise ApiError(message, status=409, param="batch_id", code="batch_ended")
            return None if record.status == "cancelling" else record.at("cancelling", self.files.now())

        changed = await self.change(batch_id, cancelled)
        if changed is None:
            raise not_found("batch", batch_id)
        return changed

    async def delete(self, owner: str, batch_id: str) -> None:
        """Deletes a batch; raises ApiError: 404 if the owner has no such batch, 409 if it has not ended."""
        found = await self.find(owner, batch_id)
        if not found.record.ended:
            message = f"batch_id: the batch is {found.record.status}, expected one that has ended; cancel it first"
            raise ApiError(message, status=409, param="batch_id", code="batch_not_ended")
        for kind in (LINES, BATCH):
            await self.store.drop_object(ObjectName(kind, batch_id))


_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def batch_reply(batch: StoredBatch) -> dict[str, Any]:
    """A batch as OpenAI shows it."""
    kept, record = batch.kept, batch.record
    errors = None
    if record.errors:
        errors = {"object": "list", "data": [asdict(each) for each in record.errors]}
    times = {f"{name}_at": record.times.get(f"{name}_at") for name in _TIMES}
    return {
        "id": kept.object_id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": errors,
        "input_file_id": record.input_file_id,
        "completion_window": "24h",
        "status": record.status,
        "output_file_id": record.output_id if record.has_output else None,
        "error_file_id": record.error_id if record.has_errors else None,
        "created_at": int(kept.created_at),
        "expires_at": int(kept.created_at + WINDOW_S),
        **{name: None if at is None else int(at) for name, at in times.items()},
        "request_counts": {"total": record.total, "completed": record.completed, "failed": record.failed},
        "metadata": record.metadata,
    }
