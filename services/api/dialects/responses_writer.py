"""Writes one answer in the form of OpenAI's ``/v1/responses``: its items, and the events that tell of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from farsight.core.messages.tokens import TokenDelta
from farsight.services.api.answers.parts import ChoiceParts
from farsight.services.api.answers.replies import UsageFields
from farsight.services.api.errors import ApiError
from farsight.services.api.generation import ChoiceResult, Generation
from farsight.tokenization.tool_formats.parts import (
    CallArguments,
    CallStart,
    OutputForm,
    ReasoningPart,
    SentPart,
    TextPart,
)

_TEXT_ALONE = OutputForm("hermes")


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
            "background": False,
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
                return self._begin(_call(self._item_id("fc"), self._parts.id_of(part), part.name))
            case CallArguments():
                self._items[-1]["arguments"] += part.text
                return self._of_item("response.function_call_arguments.delta", {"delta": part.text})

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
            case _:
                fields = {"arguments": item["arguments"], "name": item["name"]}
                data = self._of_item("response.function_call_arguments.done", fields)
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


def _call(item_id: str, call_id: str, name: str) -> dict[str, Any]:
    called = {"call_id": call_id, "name": name, "arguments": ""}
    return {"id": item_id, "type": "function_call", "status": "in_progress", **called}
