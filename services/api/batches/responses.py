"""Responses that are kept for their clients, and those that are computed in the background."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.types import ASGIApp

from farsight.core.errors import CapacityError
from farsight.core.kept import KeptObject, ObjectName, ObjectQuery, PutObject
from farsight.services.api.batches.files import UPLOADING_S, Files, not_found
from farsight.services.api.batches.lines import BatchLine
from farsight.services.api.batches.sender import LineSender, RetryPolicy
from farsight.services.api.errors import ApiError

RESPONSE, RESPONSE_RUN = "response", "response_run"
"""Kinds of kept objects: a response; that one is still to be computed, and by whom."""

PATH = "/v1/responses"
MAX_WAITING = 64
"""Responses of one tenant that are computed in the background, or wait for it."""

MAX_ALL_WAITING = 1000
UNFINISHED = ("queued", "in_progress")

Items = list[dict[str, Any]]

ANSWERED_AS: ContextVar[str] = ContextVar("farsight_answered_as", default="")
"""The id of the response that this task computes in the background; empty for any other request."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """
    Attributes:
        response: As its client gets it.
        items: The conversation up to its end, without instructions: what a request that goes on begins with.
        body: The request that is to be computed; empty once it is.
    """

    response: dict[str, Any]
    items: Items
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def is_unfinished(self) -> bool:
        return self.response["status"] in UNFINISHED

    @property
    def input_items(self) -> Items:
        """The conversation before the answer."""
        num_output = len(self.response["output"])
        return self.items[: len(self.items) - num_output]

    def ended(self, response: dict[str, Any]) -> StoredResponse:
        """Returns it with an answer, or with what else became of it; what its request said stays."""
        kept = ("id", "background", "created_at", "previous_response_id", "store")
        whole = {**response, **{name: self.response[name] for name in kept}}
        return StoredResponse(whole, [*self.items, *whole["output"]])

    def cut(self, status: str, error: dict[str, str] | None = None) -> StoredResponse:
        """Returns it without an answer."""
        return self.ended({**self.response, "status": status, "error": error})


def _pack(stored: StoredResponse) -> bytes:
    return json.dumps({"response": stored.response, "items": stored.items, "body": stored.body}).encode()


def _unpack(kept: KeptObject) -> StoredResponse:
    return StoredResponse(**json.loads(kept.record))


class StoredResponses:
    """The responses of all clients. One of another owner is one that does not exist.

    A response is kept in two steps. The first, before anything is computed, asks for the owner's quota; what has taken
    only this step is not there for its owner, and is dropped after ``UPLOADING_S``.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._store = files.store
        self._settings = files.settings
        self._now = files.now

    @property
    def keeps_unasked(self) -> bool:
        """Whether a response is kept where its request does not say ``store``."""
        return self._settings.store_responses

    async def reserve(self, owner: str, response_id: str, items: Items) -> KeptObject:
        """
        Args:
            items: The conversation before the answer.

        Raises:
            ApiError: 413: the owner's quota is used up.
            FarsightError: The log cannot be reached now.
        """
        now, size = self._now(), len(json.dumps(items))
        begun = KeptObject(RESPONSE, response_id, owner, now, now + UPLOADING_S, 1, size, b"")
        await self._put_first(begun)
        return begun

    async def _put_first(self, begun: KeptObject) -> None:
        most = self._settings.max_owner_bytes
        verdict = await self._store.put_object(PutObject(begun, most))
        if not verdict.stored:
            has = f"{begun.num_bytes} bytes beside the {verdict.owner_bytes} that you have stored"
            message = f"store: got {has}, expected at most {most} together; delete files or responses"
            raise ApiError(message, status=413, param="store", code="quota_exceeded")

    async def keep(self, begun: KeptObject, response: dict[str, Any], items: Items) -> None:
        """
        Args:
            items: The conversation before the answer.

        Raises:
            FarsightError: The log cannot be reached now.
        """
        record = _pack(StoredResponse(response, [*items, *response["output"]]))
        until = begun.created_at + self._settings.max_age_s
        whole = replace(begun, expires_at=until, revision=2, num_bytes=len(record), record=record)
        await self._store.put_object(PutObject(whole))

    async def begin(self, owner: str, response: dict[str, Any], items: Items, body: dict[str, Any]) -> None:
        """Keeps a response that will be computed in the background.

        Args:
            items: The conversation before the answer.

        Raises:
            ApiError: 413: the owner's quota is used up.
            CapacityError: Too many wait.
            FarsightError: The log cannot be reached now.
        """
        now, name = self._now(), response["id"]
        waiting = (await self._store.list_objects(ObjectQuery(RESPONSE_RUN, "", MAX_ALL_WAITING))).objects
        num_own = sum(json.loads(each.record)["owner"] == owner for each in waiting)
        if num_own >= MAX_WAITING or len(waiting) >= MAX_ALL_WAITING:
            raise CapacityError(f"responses that wait in the background: {max(num_own, len(waiting))}", 1.0)
        # The run first: a response without one would never begin, and a run without its response is dropped.
        run = json.dumps({"owner": owner}).encode()
        await self._store.put_object(PutObject(KeptObject(RESPONSE_RUN, name, "", now, 0.0, 1, 0, run)))
        record = _pack(StoredResponse(response, items, body))
        try:
            until = now + self._settings.max_age_s
            await self._put_first(KeptObject(RESPONSE, name, owner, now, until, 1, len(record), record))
        except ApiError:
            await self._store.drop_object(ObjectName(RESPONSE_RUN, name))
            raise

    async def find(self, owner: str, response_id: str, field: str = "response_id") -> StoredResponse:
        """
        Args:
            field: Where the id was written.

        Raises:
            ApiError: 404: the owner has no such response.
            FarsightError: The log cannot be reached now.
        """
        try:
            kept = await self._files.owned(RESPONSE, owner, response_id, field)
            if not kept.record:
                raise not_found(RESPONSE, response_id, field)
        except ApiError as error:
            every = "on, so that each is kept but for store: false" if self.keeps_unasked else "off"
            error.message += f"; one is kept where its request says store: true ([files] store_responses is {every})"
            raise
        return _unpack(kept)

    async def delete(self, owner: str, response_id: str) -> None:
        """Deletes a response, which is then not computed any more; raises as ``find``."""
        await self.find(owner, response_id)
        await self._store.drop_object(ObjectName(RESPONSE, response_id))

    async def cancel(self, owner: str, response_id: str) -> StoredResponse:
        """Ends a response of the background, unless it has ended, and returns it.

        Raises:
            ApiError: 404: the owner has no such response; 400: it is none of the background.
            FarsightError: The log cannot be reached now.
        """
        found = await self.find(owner, response_id)
        if not found.response["background"]:
            message = (
                f"response_id: got {response_id!r}, expected a response of the background: others end by themselves"
            )
            raise ApiError(message, param="response_id", code="response_not_in_background")
        await self.change(response_id, lambda stored: stored.cut("cancelled"))
        return await self.find(owner, response_id)

    async def look(self, response_id: str) -> tuple[str, StoredResponse] | None:
        """Returns the owner of a response of the background, and the response; None if it was deleted."""
        kept = await self._store.find_object(ObjectName(RESPONSE, response_id))
        return None if kept is None or not kept.record else (kept.owner, _unpack(kept))

    async def change(self, response_id: str, how: Callable[[StoredResponse], StoredResponse]) -> None:
        """Changes a response that has not ended, though others may do so at the same time."""
        while True:
            kept = await self._store.find_object(ObjectName(RESPONSE, response_id))
            if kept is None or not (stored := _unpack(kept)).is_unfinished:
                return
            record = _pack(how(stored))
            changed = replace(kept, revision=kept.revision + 1, num_bytes=len(record), record=record)
            if (await self._store.put_object(PutObject(changed))).stored:
                return

    async def compute(self, response_id: str, app: ASGIApp, retry: RetryPolicy, watch_s: float) -> None:
        """Computes a response of the background, until it has an answer, or is cancelled or deleted.

        Args:
            app: Answers it for the tenant of this task.
            watch_s: Seconds between looks whether it was cancelled or deleted.
        """
        found = await self.look(response_id)
        if found is None or not found[1].is_unfinished:
            return
        body = found[1].body
        await self.change(response_id, lambda stored: replace(stored, response=_in_progress(stored.response)))
        ANSWERED_AS.set(response_id)
        line = BatchLine(1, response_id, PATH, json.dumps(body).encode())
        work = asyncio.create_task(LineSender(app, retry).send(line))
        try:
            while not work.done():
                await asyncio.wait((work,), timeout=watch_s)
                seen = None if work.done() else await self.look(response_id)
                if not work.done() and (seen is None or not seen[1].is_unfinished):
                    return
            told = json.loads(work.result().data)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        reply = told["response"]
        if reply is not None and reply["status_code"] < 400:
            await self.change(response_id, lambda stored: stored.ended(reply["body"]))
            return
        why = told["error"]["message"] if reply is None else reply["body"]["error"]["message"]
        await self.change(response_id, lambda stored: stored.cut("failed", {"code": "server_error", "message": why}))


def _in_progress(response: dict[str, Any]) -> dict[str, Any]:
    return {**response, "status": "in_progress"}
