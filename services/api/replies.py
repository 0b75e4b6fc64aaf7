"""What a client gets: response models for the whole answers, and cheap dicts for the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from core.messages import StatusReply
from services.api.backend import ModelInfo
from services.api.generate import ChoiceResult
from services.api.jobs import Job


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    error: ErrorFields


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "farsight"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatAnswer(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatAnswer
    logprobs: None = None
    finish_reason: str | None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class ActorStatus(BaseModel):
    name: str
    kind: str
    pid: int
    node: str
    state: str
    queue: int
    last_step_age_s: float | None
    restarts: int
    http_port: int


class KVStatus(BaseModel):
    """The KV pool of the replica, in blocks."""

    num_blocks: int
    free_blocks: int


class Status(BaseModel):
    actors: list[ActorStatus]
    kv: KVStatus


def model_card(model: ModelInfo) -> ModelCard:
    return ModelCard(id=model.name, created=model.created, max_model_len=model.max_model_len)


def status_reply(reply: StatusReply) -> Status:
    fields = ActorStatus.model_fields
    actors = [ActorStatus(**{name: getattr(piece, name) for name in fields}) for piece in reply.pieces]
    return Status(actors=actors, kv=KVStatus(num_blocks=reply.num_blocks, free_blocks=reply.free_blocks))


def usage(jobs: Sequence[Job], num_output_tokens: int) -> Usage:
    num_prompt_tokens = sum(job.prompt_len for job in jobs)
    total = num_prompt_tokens + num_output_tokens
    return Usage(prompt_tokens=num_prompt_tokens, completion_tokens=num_output_tokens, total_tokens=total)


def completion(model: str, jobs: Sequence[Job], results: Sequence[ChoiceResult]) -> Completion:
    choices = [
        CompletionChoice(index=index, text=result.text, finish_reason=result.finish_reason)
        for index, result in enumerate(results)
    ]
    return Completion(
        id=_new_id("cmpl"),
        created=int(time.time()),
        model=model,
        choices=choices,
        usage=usage(jobs, sum(result.num_tokens for result in results)),
    )


def chat_completion(model: str, job: Job, result: ChoiceResult) -> ChatCompletion:
    answer = ChatAnswer(content=result.text)
    return ChatCompletion(
        id=_new_id("chatcmpl"),
        created=int(time.time()),
        model=model,
        choices=[ChatChoice(index=0, message=answer, finish_reason=result.finish_reason)],
        usage=usage([job], result.num_tokens),
    )


class ChunkWriter:
    """Server-sent events of one stream; every chunk has the same id.

    Args:
        chat: Chat chunks carry a ``delta``, completion chunks a ``text``.
        include_usage: Whether chunks have a ``usage`` field: null, but for the last one.
    """

    def __init__(self, model: str, *, chat: bool, include_usage: bool) -> None:
        self._chat = chat
        self._include_usage = include_usage
        self._head: dict[str, Any] = {
            "id": _new_id("chatcmpl" if chat else "cmpl"),
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def opening(self) -> bytes:
        """The first chunk of a chat names the role; a completion has nothing to say yet."""
        return self._chat_event({"role": "assistant", "content": ""}, None) if self._chat else b""

    def output(self, index: int, text: str, finish_reason: str | None) -> bytes:
        """Text, the end of a choice, both, or nothing; a chat's end is a chunk of its own."""
        if not self._chat:
            choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
            return self._event([choice]) if text or finish_reason else b""
        content = self._chat_event({"content": text}, None) if text else b""
        return content + (self._chat_event({}, finish_reason) if finish_reason else b"")

    def usage(self, usage: Usage) -> bytes:
        return event({**self._head, "choices": [], "usage": usage.model_dump()}) if self._include_usage else b""

    def _chat_event(self, delta: dict[str, str], finish_reason: str | None) -> bytes:
        return self._event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}])

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        chunk = {**self._head, "choices": choices}
        if self._include_usage:
            chunk["usage"] = None
        return event(chunk)


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
