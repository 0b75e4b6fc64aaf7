"""Anthropic's ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from farsight.core.messages.tokens import TokenDelta
from farsight.services.api.answers.parts import ChoiceParts, TakenApart, answer_of
from farsight.services.api.answers.replies import UsageFields
from farsight.services.api.bodies import LargeBodyRoute
from farsight.services.api.dialects.message_body import CountTokensRequest, MessagesRequest
from farsight.services.api.dialects.running import Running, as_chat
from farsight.services.api.errors import ERRORS, ApiError
from farsight.services.api.generation import ChoiceResult, Generation
from farsight.services.api.middleware import ANTHROPIC_PATH, anthropic_error
from farsight.services.api.requests import check_model
from farsight.services.api.text.token_texts import TokenTexts
from farsight.tokenization.tool_formats.parts import (
    CallArguments,
    CallStart,
    OutputForm,
    ReasoningPart,
    SentPart,
    TextPart,
)

_TEXT_ALONE = OutputForm("hermes")
_TAIL_TOKENS = 64
"""Last tokens of an output in which its stop string is looked for."""


def message_routes(running: Running) -> APIRouter:
    router = APIRouter(prefix=ANTHROPIC_PATH, tags=["messages"], responses=ERRORS, route_class=LargeBodyRoute)

    @router.post("")
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        # In a thread, since a picture may stand in the body.
        chat = await asyncio.to_thread(as_chat, body.chat)
        generation = await running.begin(chat, request, "msg_")
        texts, stops = running.encoder.texts, body.stop_sequences or ()
        if generation.stream:
            return running.stream(generation, MessageWriter(generation, texts, stops))

        def reply(result: ChoiceResult, used: UsageFields) -> dict[str, Any]:
            return message_reply(generation, result, used, texts, stops)

        return await running.whole(request, generation, reply)

    @router.post("/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        chat = await asyncio.to_thread(as_chat, body.chat)
        check_model(chat.model, running.backend.model)
        return JSONResponse({"input_tokens": len(await running.prompt_ids(chat, request))})

    return router


def message_reply(
    generation: Generation, result: ChoiceResult, used: UsageFields, texts: TokenTexts, stops: Sequence[str]
) -> dict[str, Any]:
    answer = answer_of(generation.form, result.text, generation.response_id, 0)
    reason, stop = _stop_reason(result.finish_reason, bool(answer.calls), result.token_ids, texts, stops)
    return {
        **_head(generation),
        "content": _blocks(answer),
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": _usage(used),
    }


def _head(generation: Generation) -> dict[str, Any]:
    return {"id": generation.response_id, "type": "message", "role": "assistant", "model": generation.model}


def _blocks(answer: TakenApart) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    calls = (
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _input(call.arguments)}
        for call in answer.calls
    )
    return [*blocks, *calls]


def _input(arguments: str) -> dict[str, Any]:
    """Arguments that are no JSON object, such as those of a call that was cut, are told as they are."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _usage(used: UsageFields) -> dict[str, Any]:
    cached = used.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": used.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": used.completion_tokens,
    }


def _stop_reason(
    reason: str | None, calls: bool, token_ids: Sequence[int], texts: TokenTexts, stops: Sequence[str]
) -> tuple[str, str | None]:
    """Tells why an output ended, and by which stop string."""
    if reason == "length":
        return "max_tokens", None
    if calls:
        return "tool_use", None
    if stops and token_ids and token_ids[-1] not in texts.decoder.special_ids:
        tail = texts.decoder.decode(tuple(token_ids[-_TAIL_TOKENS:]))
        found = [stop for stop in stops if stop in tail]
        if found:
            return "stop_sequence", min(found, key=tail.find)
    return "end_turn", None


class MessageWriter:
    """The events of one message: each block begins, grows and stops."""

    def __init__(self, generation: Generation, texts: TokenTexts, stops: Sequence[str]) -> None:
        self._generation = generation
        self._texts = texts
        self._stops = stops
        self._parts = ChoiceParts(generation.form or _TEXT_ALONE, generation.response_id, 0, stream=True)
        self._block: tuple[str, int] | None = None  # kind, and the index of a call
        self._num_blocks = 0
        self._token_ids: list[int] = []
        self._reason: tuple[str, str | None] = "end_turn", None

    def opening(self) -> bytes:
        used = {"input_tokens": self._generation.num_prompt_tokens, "output_tokens": 0}
        message = {**_head(self._generation), "content": [], "stop_reason": None, "stop_sequence": None, "usage": used}
        return _event("message_start", {"message": message})

    def output(self, index: int, delta: TokenDelta) -> bytes:
        self._token_ids = [*self._token_ids, *delta.token_ids][-_TAIL_TOKENS:]
        data = b"".join(map(self._part, self._parts.read(delta.text, ended=delta.finish_reason is not None)))
        if delta.finish_reason is not None:
            calls = self._parts.num_calls > 0
            self._reason = _stop_reason(delta.finish_reason, calls, self._token_ids, self._texts, self._stops)
        return data

    def _part(self, part: SentPart) -> bytes:
        match part:
            case TextPart():
                begin = self._open("text", 0, {"type": "text", "text": ""})
                return begin + self._grow({"type": "text_delta", "text": part.text})
            case ReasoningPart():
                begin = self._open("thinking", 0, {"type": "thinking", "thinking": "", "signature": ""})
                return begin + self._grow({"type": "thinking_delta", "thinking": part.text})
            case CallStart():
                block = {"type": "tool_use", "id": self._parts.id_of(part), "name": part.name, "input": {}}
                return self._open("tool_use", part.index, block)
            case CallArguments():
                return self._grow({"type": "input_json_delta", "partial_json": part.text})

    def _open(self, kind: str, call: int, block: dict[str, Any]) -> bytes:
        """Begins a block of this kind unless one is open."""
        if self._block == (kind, call):
            return b""
        closed = self._close()
        self._block = kind, call
        self._num_blocks += 1
        return closed + _event("content_block_start", {"index": self._num_blocks - 1, "content_block": block})

    def _grow(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._num_blocks - 1, "delta": delta})

    def _close(self) -> bytes:
        if self._block is None:
            return b""
        self._block = None
        return _event("content_block_stop", {"index": self._num_blocks - 1})

    def end(self, used: UsageFields) -> bytes:
        reason, stop = self._reason
        changed = {"delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": _usage(used)}
        return self._close() + _event("message_delta", changed) + _event("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        return _event("error", anthropic_error(error.status, error.body()["error"]))


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()
