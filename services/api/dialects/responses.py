"""OpenAI's ``/v1/responses``: answers, their items and events, and those that are kept for their clients."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from farsight.core.errors import InvalidValueError
from farsight.core.kept import KeptObject
from farsight.core.messages.tokens import TokenDelta
from farsight.services.api.access.keys import tenant_name
from farsight.services.api.answers.parts import ChoiceParts
from farsight.services.api.answers.replies import UsageFields
from farsight.services.api.answers.sse import EventStream, chunks
from farsight.services.api.batches.files import not_found
from farsight.services.api.batches.responses import ANSWERED_AS, RESPONSE, Items, StoredResponses
from farsight.services.api.bodies import LargeBodyRoute
from farsight.services.api.dialects.response_body import MAX_ITEMS, ResponsesRequest
from farsight.services.api.dialects.running import Running, as_chat
from farsight.services.api.errors import ERRORS, ApiError, as_api_error
from farsight.services.api.generation import ChoiceResult, Generation
from farsight.tokenization.tool_formats.parts import (
    CallArguments,
    CallStart,
    OutputForm,
    ReasoningPart,
    SentPart,
    TextPart,
)

_NO_STORE = "nothing can be stored here: [files] max_file_bytes is 0"
_TEXT_ALONE = OutputForm("hermes")
_TEXT_KINDS = {"assistant": "output_text"}


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

    def count(text: str) -> int:
        return len(running.encoder.encode_prompt(text, add_special_tokens=False).ids)

    @router.post("/responses")
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        if body.top_logprobs:
            raise InvalidValueError("top_logprobs", body.top_logprobs, "0 or null: /v1/chat/completions has them")
        stores = bool(stored is not None and stored.keeps_unasked if body.store is None else body.store)
        earlier = await _earlier(body, stored)
        # In a thread, since a picture may stand in the body or in what was stored before.
        chat = await asyncio.to_thread(as_chat, lambda: body.chat(earlier))
        generation = await running.read(chat)
        items = [*earlier, *body.items()]
        if body.background:
            return await _begin(body, generation, items, _has(stored, "background"), stores=stores)
        continues = body.previous_response_id or ""
        generation = await running.begin(generation, request, "resp_", ANSWERED_AS.get(), continues=continues)
        keeping = None
        if stores:
            begun = await _has(stored, "store").reserve(tenant_name(), generation.response_id, items)
            keeping = Keeping(_has(stored, "store"), begun, items)
        writer = ResponseWriter(generation, _echo(body, stores=stores), count)
        if generation.stream and keeping is not None:
            events = keeping.before_end(chunks(running.backend, generation, writer), writer)
            return EventStream(events, failure=writer.failure)
        return await running.answer(request, generation, writer, None if keeping is None else keeping.keep)

    async def _begin(
        body: ResponsesRequest, generation: Generation, items: Items, store: StoredResponses, *, stores: bool
    ) -> Response:
        """Has a response computed in the background, after all that its body says has been checked."""
        if not stores:
            raise InvalidValueError(
                "background", True, "false or null where the response is not kept: send store: true"
            )
        if body.stream:
            raise InvalidValueError("stream", True, "false or null beside background: ask for the response by its id")
        if len(items) > MAX_ITEMS:
            raise InvalidValueError("input", f"a conversation of {len(items)} items", f"at most {MAX_ITEMS} of them")
        named = replace(generation, response_id=f"resp_{uuid.uuid4().hex}")
        response = ResponseWriter(named, _echo(body, stores=True), count).queued()
        rest = body.model_dump(mode="json", by_alias=True, exclude_unset=True)
        for name in ("background", "previous_response_id", "store"):
            rest.pop(name, None)
        await store.begin(tenant_name(), response, items, {**rest, "input": items, "store": False})
        return JSONResponse(response)

    def found(response_id: str) -> tuple[StoredResponses, str]:
        if stored is None:
            error = not_found(RESPONSE, response_id, "response_id")
            error.message += f"; {_NO_STORE}"
            raise error
        return stored, tenant_name()

    one = APIRouter(prefix="/v1/responses/{response_id}", tags=["responses"], responses=ERRORS)

    @one.get("")
    async def get_response(response_id: str, stream: bool = False) -> dict[str, Any]:
        if stream:
            raise InvalidValueError("stream", True, "false: a response that is kept is sent as a whole")
        store, owner = found(response_id)
        return (await store.find(owner, response_id)).response

    @one.delete("")
    async def delete_response(response_id: str) -> dict[str, Any]:
        store, owner = found(response_id)
        await store.delete(owner, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @one.post("/cancel")
    async def cancel_response(response_id: str) -> dict[str, Any]:
        store, owner = found(response_id)
        return (await store.cancel(owner, response_id)).response

    @one.get("/input_items")
    async def list_input_items(
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str, Query(max_length=256)] = "",
    ) -> dict[str, Any]:
        store, owner = found(response_id)
        rows = _input_items(response_id, (await store.find(owner, response_id)).input_items)
        rows = rows if order == "asc" else rows[::-1]
        begin = next((index + 1 for index, row in enumerate(rows) if row["id"] == after), 0)
        if after and not begin:
            raise InvalidValueError("after", after, "the id of an item of this response")
        page = rows[begin : begin + limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
        return {"object": "list", "data": page, **ends, "has_more": begin + limit < len(rows)}

    router.routes.extend(one.routes)
    return router


def _input_items(response_id: str, items: Items) -> Items:
    """Returns items as OpenAI lists them: each with an id, and the content of a message in parts."""
    rows = []
    for index, item in enumerate(items):
        row = {"id": f"item_{response_id.removeprefix('resp_')}_{index}", "status": "completed", **item}
        if row.get("type", "message") == "message":
            row["type"] = "message"
            kind = _TEXT_KINDS.get(row["role"], "input_text")
            parts = [{"type": kind, "text": row["content"]}] if isinstance(row["content"], str) else row["content"]
            extra: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
            row["content"] = [{**extra, **part} if part["type"] == "output_text" else part for part in parts]
            row["content"] = [
                {"detail": "auto", **part} if "image" in part["type"] else part for part in row["content"]
            ]
        rows.append(row)
    return rows


async def _earlier(body: ResponsesRequest, stored: StoredResponses | None) -> Items:
    """The items of the conversation that a request goes on with."""
    if body.previous_response_id is None:
        return []
    field, name = "previous_response_id", body.previous_response_id
    found = await _has(stored, field).find(tenant_name(), name, field)
    if found.response["status"] not in ("completed", "incomplete"):
        raise InvalidValueError(field, f"{name}, which is {found.response['status']}", "a response that has an answer")
    return found.items


def _has(stored: StoredResponses | None, field: str) -> StoredResponses:
    if stored is None:
        raise ApiError(f"{field}: got a value, expected null: {_NO_STORE}", param=field, code="invalid_value")
    return stored


def _echo(body: ResponsesRequest, *, stores: bool) -> dict[str, Any]:
    """What a response says about its request."""
    written = body.model_dump(mode="json", by_alias=True)
    formats = (written["text"] or {}).get("format") or {"type": "text"}
    tools = [
        {**tool, "strict": bool(tool["strict"])} if tool["type"] == "function" else _given(tool)
        for tool in written["tools"] or []
    ]
    return {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "background": bool(body.background),
        "store": stores,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {key: value for key, value in formats.items() if value is not None}},
        "tool_choice": written["tool_choice"] or "auto",
        "tools": tools,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _given(value) if isinstance(value, dict) else value for name, value in fields.items() if value is not None
    }


class ResponseWriter:
    """The items of one response, and the events that tell of them as they come.

    Args:
        echo: What the response says about its request.
        count: Tokens of a text.

    Attributes:
        whole: The response once it has ended; None before, and where it has failed.
    """

    def __init__(self, generation: Generation, echo: dict[str, Any], count: Callable[[str], int]) -> None:
        self._generation = generation
        self._echo = echo
        self._count = count
        self._created = int(time.time())
        form = generation.form or _TEXT_ALONE
        self._parts = ChoiceParts(form, generation.response_id, 0, stream=generation.stream)
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        self._reason: str | None = None
        self._num_events = 0
        self.whole: dict[str, Any] | None = None

    def queued(self) -> dict[str, Any]:
        """Returns the response before it is computed."""
        return self._response("queued", None)

    def opening(self) -> bytes:
        response = self._response("in_progress", None)
        return self._event("response.created", {"response": response}) + self._event(
            "response.in_progress", {"response": response}
        )

    def output(self, index: int, delta: TokenDelta) -> bytes:
        return self._read(delta.text, delta.finish_reason)

    def _read(self, text: str, reason: str | None) -> bytes:
        """The events of further text."""
        data = b"".join(map(self._part, self._parts.read(text, ended=reason is not None)))
        if reason is not None:
            self._reason = reason
            if not self._items:
                data += self._begin(_message(self._item_id("msg")))
            data += self._finish("incomplete" if reason == "length" else "completed")
        return data

    def end(self, used: UsageFields) -> bytes:
        self.whole = response = self._whole(used)
        return self._event(f"response.{response['status']}", {"response": response})

    def failure(self, error: ApiError) -> bytes:
        response = self._response("failed", None)
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", {"response": response})

    def reply(self, result: ChoiceResult, used: UsageFields) -> dict[str, Any]:
        self._read(result.text, result.finish_reason)
        return self._whole(used)

    def _whole(self, used: UsageFields) -> dict[str, Any]:
        thought = "".join(item["content"][0]["text"] for item in self._items if item["type"] == "reasoning")
        usage = {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": used.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": min(self._count(thought), used.completion_tokens)},
            "total_tokens": used.total_tokens,
        }
        return self._response("incomplete" if self._reason == "length" else "completed", usage)

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self._generation.response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._generation.model,
            "output": [dict(item) for item in self._items],
            "usage": usage,
            **self._echo,
        }

    def _part(self, part: SentPart) -> bytes:
        match part:
            case TextPart():
                data = b"" if self._is("message") else self._begin(_message(self._item_id("msg")))
                return data + self._grow("response.output_text.delta", part.text, {"logprobs": []})
            case ReasoningPart():
                data = b"" if self._is("reasoning") else self._begin(_reasoning(self._item_id("rs")))
                return data + self._grow("response.reasoning_text.delta", part.text)
            case CallStart():
                kind = "custom_tool_call" if self._parts.is_custom(part.index) else "function_call"
                item_id = self._item_id("fc" if kind == "function_call" else "ctc")
                return self._begin(_call(kind, item_id, self._parts.id_of(part), part.name))
            case CallArguments():
                field = _CALLS[self._items[-1]["type"]]
                self._items[-1][field] += part.text
                return self._of_item(f"response.{self._items[-1]['type']}_{field}.delta", {"delta": part.text})

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._generation.response_id.removeprefix('resp_')}_{len(self._items)}"

    def _is(self, kind: str) -> bool:
        return self._is_open and self._items[-1]["type"] == kind

    def _begin(self, item: dict[str, Any]) -> bytes:
        data = self._finish("completed")
        self._is_open = True
        self._items.append(item)
        shown = {**item, "content": []} if item["type"] in ("message", "reasoning") else dict(item)
        data += self._event("response.output_item.added", {"output_index": len(self._items) - 1, "item": shown})
        if item["type"] == "message":
            data += self._of_item("response.content_part.added", {"content_index": 0, "part": dict(item["content"][0])})
        return data

    def _grow(self, kind: str, text: str, fields: dict[str, Any] | None = None) -> bytes:
        self._items[-1]["content"][0]["text"] += text
        return self._of_item(kind, {"content_index": 0, "delta": text, **(fields or {})})

    def _finish(self, status: str) -> bytes:
        """Ends the open item, if there is one."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        match item["type"]:
            case "message":
                text = item["content"][0]["text"]
                fields = {"content_index": 0, "text": text, "logprobs": []}
                data = self._of_item("response.output_text.done", fields)
                part = {"content_index": 0, "part": dict(item["content"][0])}
                data += self._of_item("response.content_part.done", part)
            case "reasoning":
                fields = {"content_index": 0, "text": item["content"][0]["text"]}
                data = self._of_item("response.reasoning_text.done", fields)
            case "function_call":
                fields = {"arguments": item["arguments"], "name": item["name"]}
                data = self._of_item("response.function_call_arguments.done", fields)
            case _:
                data = self._of_item("response.custom_tool_call_input.done", {"input": item["input"]})
        done = {"output_index": len(self._items) - 1, "item": dict(item)}
        return data + self._event("response.output_item.done", done)

    def _of_item(self, kind: str, fields: dict[str, Any]) -> bytes:
        return self._event(kind, {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **fields})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        value = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return f"event: {kind}\ndata: {data}\n\n".encode()


def _message(item_id: str) -> dict[str, Any]:
    content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"id": item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": [content]}


def _reasoning(item_id: str) -> dict[str, Any]:
    content = {"type": "reasoning_text", "text": ""}
    return {"id": item_id, "type": "reasoning", "status": "in_progress", "summary": [], "content": [content]}


_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""By the type of a call, the field of what it was called with."""


def _call(kind: str, item_id: str, call_id: str, name: str) -> dict[str, Any]:
    called = {"call_id": call_id, "name": name, _CALLS[kind]: ""}
    return {"id": item_id, "type": kind, "status": "in_progress", **called}
