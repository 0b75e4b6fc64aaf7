"""Responses that clients leave with the service, in the log beside files and batches."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from farsight.core.kept import KeptObject, ObjectName, PutObject
from farsight.services.api.batches.files import UPLOADING_S, Files, not_found
from farsight.services.api.dialects.responses_writer import ResponseWriter
from farsight.services.api.errors import ApiError, as_api_error

RESPONSE = "response"
"""Kind of the kept objects."""

Items = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """
    Attributes:
        response: As its client got it.
        items: The conversation up to its end, without instructions: what a request that goes on begins with.
    """

    response: dict[str, Any]
    items: Items


class StoredResponses:
    """The responses of all clients. One of another owner is one that does not exist.

    A response is kept in two steps. The first, before anything is computed, asks for the owner's quota; what has taken
    only this step is not there for its owner, and is dropped after ``UPLOADING_S``.
    """

    def __init__(self, files: Files) -> None:
        self._store = files.store
        self._settings = files.settings
        self._now = files.now

    async def reserve(self, owner: str, response_id: str, items: Items) -> KeptObject:
        """
        Args:
            items: The conversation before the answer.

        Raises:
            ApiError: 413: the owner's quota is used up.
            FarsightError: The log cannot be reached now.
        """
        now, most = self._now(), self._settings.max_owner_bytes
        size = len(json.dumps(items))
        begun = KeptObject(RESPONSE, response_id, owner, now, now + UPLOADING_S, 1, size, b"")
        verdict = await self._store.put_object(PutObject(begun, most))
        if not verdict.stored:
            has = f"{size} bytes beside the {verdict.owner_bytes} that you have stored"
            message = f"store: got {has}, expected at most {most} together; delete files or responses"
            raise ApiError(message, status=413, param="store", code="quota_exceeded")
        return begun

    async def keep(self, begun: KeptObject, response: dict[str, Any], items: Items) -> None:
        """
        Args:
            items: The conversation before the answer.

        Raises:
            FarsightError: The log cannot be reached now.
        """
        record = json.dumps({"response": response, "items": [*items, *response["output"]]}).encode()
        whole = KeptObject(
            RESPONSE,
            begun.object_id,
            begun.owner,
            begun.created_at,
            begun.created_at + self._settings.max_age_s,
            2,
            len(record),
            record,
        )
        await self._store.put_object(PutObject(whole))

    async def find(self, owner: str, response_id: str, field: str = "response_id") -> StoredResponse:
        """
        Args:
            field: Where the id was written.

        Raises:
            ApiError: 404: the owner has no such response.
            FarsightError: The log cannot be reached now.
        """
        kept = await self._store.find_object(ObjectName(RESPONSE, response_id))
        if kept is None or kept.owner != owner or kept.expires_at <= self._now() or not kept.record:
            raise not_found("response", response_id, field)
        return StoredResponse(**json.loads(kept.record))

    async def delete(self, owner: str, response_id: str) -> None:
        """
        Raises:
            ApiError, FarsightError: As ``find``.
        """
        await self.find(owner, response_id)
        await self._store.drop_object(ObjectName(RESPONSE, response_id))


@dataclass(frozen=True, slots=True)
class Keeping:
    """A response that is stored once it has ended."""

    stored: StoredResponses
    begun: KeptObject
    items: Items

    async def keep(self, response: dict[str, Any]) -> None:
        await self.stored.keep(self.begun, response, self.items)

    async def before_end(
        self, events: AsyncGenerator[bytes, None], writer: ResponseWriter
    ) -> AsyncGenerator[bytes, None]:
        """The same events; the last one, which says that the response is complete, waits until it is stored.

        A response that cannot be stored ends with the event of its failure.
        """
        async with aclosing(events) as source:
            async for chunk in source:
                tail = chunk
                if writer.whole is not None:
                    try:
                        await self.keep(writer.whole)
                    except Exception as error:
                        tail = writer.failure(as_api_error(error))
                yield tail
