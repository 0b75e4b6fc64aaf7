"""OpenAI's ``/v1/responses``: answers, and those that their clients have stored."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from farsight.core.errors import InvalidValueError
from farsight.services.api.access.keys import tenant_name
from farsight.services.api.answers.sse import EventStream, chunks
from farsight.services.api.bodies import LargeBodyRoute
from farsight.services.api.dialects.response_body import ResponsesRequest
from farsight.services.api.dialects.responses_writer import ResponseWriter
from farsight.services.api.dialects.running import Running, as_chat
from farsight.services.api.dialects.stored import Keeping, StoredResponses
from farsight.services.api.errors import ERRORS, ApiError

_NO_STORE = "nothing can be stored here: [files] max_file_bytes is 0"


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
        generation = await running.begin(await running.read(chat), request, "resp_")
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
