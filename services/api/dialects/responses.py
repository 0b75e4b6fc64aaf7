"""OpenAI's ``/v1/responses``: answers, and those that their clients have stored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from farsight.core.errors import InvalidValueError
from farsight.core.kept import KeptObject, ObjectName, PutObject
from farsight.services.api.access.keys import tenant_name
from farsight.services.api.answers.sse import EventStream, chunks
from farsight.services.api.batches.files import UPLOADING_S, Files, not_found
from farsight.services.api.bodies import LargeBodyRoute
from farsight.services.api.dialects.response_body import ResponsesRequest
from farsight.services.api.dialects.responses_writer import ResponseWriter
from farsight.services.api.dialects.running import Running, as_chat
from farsight.services.api.errors import ERRORS, ApiError, as_api_error

_NO_STORE = "nothing can be stored here: [files] max_file_bytes is 0"


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
        self._files = files
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
        kept = await self._files.owned(RESPONSE, owner, response_id, field)
        if not kept.record:
            raise not_found("response", response_id, field)
        return StoredResponse(**json.loads(kept.record))

    async def delete(self, owner: str, response_id: str) -> None:
        """Deletes a response; raises as ``find``."""
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


def response_routes(running: Running, stored: StoredResponses | None) -> APIRouter:
    """
    Args:
        stored: Where responses are kept whose clients ask for it; None keeps none.
    """

    router = APIRouter(prefix="/v1", tags=["responses"], responses=ERRORS, route_class=LargeBodyRoute)

    @router.post("/responses")
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        if body.top_logprobs:
            raise InvalidValueError("top_logprobs", body.top_logprobs, "0 or null: /v1/chat/completions has them")
        earlier = await _earlier(body, stored)
        # In a thread, since a picture may stand in the body or in what was stored before.
        chat = await asyncio.to_thread(as_chat, lambda: body.chat(earlier))
        generation = await running.begin(await running.read(chat), request, "resp_", body.previous_response_id or "")
        keeping = None
        if body.store:
            items = [*earlier, *body.items()]
            begun = await _has(stored, "store").reserve(tenant_name(), generation.response_id, items)
            keeping = Keeping(_has(stored, "store"), begun, items)

        def count(text: str) -> int:
            return len(running.encoder.encode_prompt(text, add_special_tokens=False).ids)

        writer = ResponseWriter(generation, _echo(body), count)
        if generation.stream and keeping is not None:
            events = keeping.before_end(chunks(running.backend, generation, writer), writer)
            return EventStream(events, failure=writer.failure)
        return await running.answer(request, generation, writer, None if keeping is None else keeping.keep)

    if stored is not None:
        router.include_router(_stored_routes(stored))
    return router


def _stored_routes(stored: StoredResponses) -> APIRouter:
    router = APIRouter(prefix="/responses")

    @router.get("/{response_id}")
    async def get_response(response_id: str) -> dict[str, Any]:
        return (await stored.find(tenant_name(), response_id)).response

    @router.delete("/{response_id}")
    async def delete_response(response_id: str) -> dict[str, Any]:
        await stored.delete(tenant_name(), response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return router


async def _earlier(body: ResponsesRequest, stored: StoredResponses | None) -> list[dict[str, Any]]:
    """The items of the conversation that a request goes on with."""
    if body.previous_response_id is None:
        return []
    field = "previous_response_id"
    return (await _has(stored, field).find(tenant_name(), body.previous_response_id, field)).items


def _has(stored: StoredResponses | None, field: str) -> StoredResponses:
    if stored is None:
        raise ApiError(f"{field}: got a value, expected null: {_NO_STORE}", param=field, code="invalid_value")
    return stored


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    """What a response says about its request."""
    written = body.model_dump(mode="json", by_alias=True)
    formats = (written["text"] or {}).get("format") or {"type": "text"}
    tools = [{**tool, "strict": bool(tool["strict"])} for tool in written["tools"] or []]
    return {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": bool(body.store),
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {key: value for key, value in formats.items() if value is not None}},
        "tool_choice": written["tool_choice"] or "auto",
        "tools": tools,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
