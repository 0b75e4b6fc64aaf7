"""Anthropic's ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from farsight.core.messages.tokens import TokenDelta
from farsight.services.api.answers.parts import ChoiceParts
from farsight.services.api.answers.replies import UsageFields
from farsight.services.api.bodies import LargeBodyRoute
from farsight.services.api.dialects.message_body import CountTokensRequest, MessagesRequest
from farsight.services.api.dialects.running import Running, as_chat
from farsight.services.api.errors import ERRORS, ApiError
from farsight.services.api.generation import ChoiceResult, Generation
from farsight.services.api.middleware import ANTHROPIC_PATH, anthropic_error
from farsight.services.api.requests import check_model
from farsight.services.api.text.dialect import TokenTexts
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
        generation = await running.begin(await running.read(chat), request, "msg_")
        writer = MessageWriter(generation, running.encoder.texts, body.stop_sequences or ())
        return await running.answer(request, generation, writer)

    @router.post("/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        chat = await asyncio.to_thread(as_chat, body.chat)
        check_model(chat.model, running.backend.model)
        return JSONResponse({"input_tokens": len(await running.prompt_ids(chat, request))})

    return router


def _head(generation: Generation) -> dict[str, Any]:
    return {"id": generation.response_id, "type": "message", "role": "assistant", "model": generation.model}


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
    """The blocks of one message, and the events that tell of them as they come: each begins, grows and stops."""

    def __init__(self, generation: Generation, texts: TokenTexts, stops: Sequence[str]) -> None:
        self._generation = generation
        self._texts = texts
        self._stops = stops
        form = generation.form or _TEXT_ALONE
        self._parts = ChoiceParts(form, generation.response_id, 0, stream=generation.stream)
        self._block: tuple[str, int] | None = None  # kind of the open block, and the index of a call
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""  # of the open call
        self._token_ids: list[int] = []
        self._reason: tuple[str, str | None] = "end_turn", None

    def opening(self) -> bytes:
        used = {"input_tokens": self._generation.num_prompt_tokens, "output_tokens": 0}
        message = {**_head(self._generation), "content": [], "stop_reason": None, "stop_sequence": None, "usage": used}
        return _event("message_start", {"message": message})

    def output(self, index: int, delta: TokenDelta) -> bytes:
        return self._read(delta.text, delta.token_ids, delta.finish_reason)

    def _read(self, text: str, token_ids: Sequence[int], reason: str | None) -> bytes:
        self._token_ids = [*self._token_ids, *token_ids][-_TAIL_TOKENS:]
        data = b"".join(map(self._part, self._parts.read(text, ended=reason is not None)))
        if reason is not None:
            calls = self._parts.num_calls > 0
            self._reason = _stop_reason(reason, calls, self._token_ids, self._texts, self._stops)
        return data

    def reply(self, result: ChoiceResult, used: UsageFields) -> dict[str, Any]:
        self._read(result.text, result.token_ids, result.finish_reason)
        self._close()
        reason, stop = self._reason
        ended = {"stop_reason": reason, "stop_sequence": stop, "usage": _usage(used)}
        return {**_head(self._generation), "content": self._blocks, **ended}

    def _part(self, part: SentPart) -> bytes:
        match part:
            case TextPart():
                return self._grow("text", {"type": "text", "text": ""}, part.text)
            case ReasoningPart():
                return self._grow("thinking", {"type": "thinking", "thinking": "", "signature": ""}, part.text)
            case CallStart():
                closed = self._close()
                self._arguments = ""
                block = {"type": "tool_use", "id": self._parts.id_of(part), "name": part.name, "input": {}}
                return closed + self._open("tool_use", part.index, block)
            case CallArguments():
                self._arguments += part.text
                return self._delta({"type": "input_json_delta", "partial_json": part.text})

    def _grow(self, kind: str, block: dict[str, Any], text: str) -> bytes:
        """Adds text to the open block of this kind; begins the block if none is open."""
        data = self._open(kind, 0, block)
        self._blocks[-1][kind] += text
        return data + self._delta({"type": f"{kind}_delta", kind: text})

    def _open(self, kind: str, call: int, block: dict[str, Any]) -> bytes:
        """Begins a block of this kind unless one is open."""
        if self._block == (kind, call):
            return b""
        closed = self._close()
        self._block = kind, call
        self._blocks.append(block)
        return closed + _event("content_block_start", {"index": len(self._blocks) - 1, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": len(self._blocks) - 1, "delta": delta})

    def _close(self) -> bytes:
        if self._block is None:
            return b""
        if self._block[0] == "tool_use":
            self._blocks[-1]["input"] = _input(self._arguments)
        self._block = None
        return _event("content_block_stop", {"index": len(self._blocks) - 1})

    def end(self, used: UsageFields) -> bytes:
        reason, stop = self._reason
        changed = {"delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": _usage(used)}
        return self._close() + _event("message_delta", changed) + _event("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        return _event("error", anthropic_error(error.status, error.body()["error"]))


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()
