"""Every reply is what the ``openai`` library's own models say, strictly; what else a reply has is listed here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from openai.pagination import SyncCursorPage, SyncPage
from openai.types import Batch, Completion, CompletionChoice, CreateEmbeddingResponse, FileDeleted, FileObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.e2e.server import LONG_S

OURS = {
    *("prompt_token_ids", "choices.prompt_token_ids", "choices.token_ids"),
    *("prompt_logprobs", "choices.prompt_logprobs", "service_tier", "usage.gpu_seconds"),
    *("id", "created"),
    *("store", "response.store", "name", "object", "first_id", "last_id"),
}
"""Fields that the library's models do not have: vLLM's, the tier of a completion, what a request cost; id and time of
embeddings; and what OpenAI's API reference has of responses, their events and lists.

One value differs: with ``echo`` and ``logprobs`` the first token has null as its log probability, as OpenAI and vLLM
answer, where the library wants a number.
"""


class ChunkChoice(CompletionChoice):
    """A choice of a streamed completion, which goes on; the library has one model for both."""

    finish_reason: Literal["stop", "length", "content_filter"] | None  # type: ignore[assignment]


class CompletionChunk(Completion):
    choices: list[ChunkChoice]  # type: ignore[assignment]


SAY = [{"role": "user", "content": "upper: red"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]

COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "upper: red", "max_tokens": 4},
    {"prompt": ["upper: red", "count: a b"], "n": 2, "temperature": 1.0, "seed": 1, "max_tokens": 4},
    {"prompt": "upper: red", "max_tokens": 4, "logprobs": 2},
    {"prompt": [5, 6], "max_tokens": 4, "stop": ["a"], "user": "u", "return_token_ids": True},
    {"prompt": "upper: red", "max_tokens": 20, "structured_outputs": {"choice": ["yes", "no"]}},
]
CHATS: list[dict[str, Any]] = [
    {"max_tokens": 4},
    {"max_completion_tokens": 4, "n": 2, "temperature": 1.0, "logprobs": True, "top_logprobs": 3},
    {"max_tokens": 60, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"max_tokens": 60, "tools": TOOLS, "tool_choice": "required"},
    {"max_tokens": 60, "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False},
    {"max_tokens": 4, "service_tier": "flex", "metadata": {"a": "b"}},
]
RESPONSES: list[dict[str, Any]] = [
    {"input": "upper: red", "max_output_tokens": 4, "store": True},
    {"input": SAY, "max_output_tokens": 60, "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    {"input": SAY, "max_output_tokens": 60, "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def client(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{base_url}/v1", timeout=LONG_S) as client:
        yield client


def check(model: BaseModel) -> None:
    """Fails where a reply has a field that neither the library nor ``OURS`` knows."""
    assert set(others(model, "")) <= OURS


def others(found: object, path: str) -> Iterator[str]:
    """Names of the fields that the library does not know, at any depth."""
    if isinstance(found, list):
        for each in found:
            yield from others(each, path)
    if not isinstance(found, BaseModel):
        return
    for name in found.model_extra or {}:
        yield f"{path}{name}"
    for name in type(found).model_fields:
        yield from others(getattr(found, name), f"{path}{name}.")


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply


def chunks(client: httpx.Client, path: str, body: dict[str, Any]) -> list[str]:
    """The data of each event of a stream but ``[DONE]``."""
    options = {} if path == "/responses" else {"stream_options": {"include_usage": True}}
    lines = post(client, path, body | {"stream": True} | options).text.splitlines()
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert len(found) > 1
    return [each for each in found if each != "[DONE]"]


@pytest.mark.parametrize("body", COMPLETIONS)
def test_completions(client: httpx.Client, model_name: str, body: dict[str, Any]) -> None:
    body = {"model": model_name, **body}
    check(Completion.model_validate_json(post(client, "/completions", body).content, strict=True))
    for data in chunks(client, "/completions", body):
        check(CompletionChunk.model_validate_json(data, strict=True))


@pytest.mark.parametrize("body", CHATS)
def test_chats(client: httpx.Client, model_name: str, body: dict[str, Any]) -> None:
    body = {"model": model_name, "messages": SAY, **body}
    check(ChatCompletion.model_validate_json(post(client, "/chat/completions", body).content, strict=True))
    for data in chunks(client, "/chat/completions", body):
        check(ChatCompletionChunk.model_validate_json(data, strict=True))


@pytest.mark.parametrize("body", RESPONSES)
def test_responses(client: httpx.Client, model_name: str, body: dict[str, Any]) -> None:
    body = {"model": model_name, **body}
    response = Response.model_validate_json(post(client, "/responses", body).content, strict=True)
    check(response)
    for data in chunks(client, "/responses", body):
        check(EVENTS.validate_json(data, strict=True))
    if body.get("store"):
        kept = client.get(f"/responses/{response.id}").content
        check(Response.model_validate_json(kept, strict=True))
        assert client.delete(f"/responses/{response.id}").status_code == 200


def test_models_and_embeddings(client: httpx.Client, model_name: str) -> None:
    listed = SyncPage[Model].model_validate_json(client.get("/models").content, strict=True)
    assert [model.id for model in listed.data] == [model_name]
    Model.model_validate_json(client.get(f"/models/{model_name}").content, strict=True)
    body = {"model": model_name, "input": ["a", "b"], "encoding_format": "float"}
    check(CreateEmbeddingResponse.model_validate_json(post(client, "/embeddings", body).content, strict=True))


def test_files_and_batches(client: httpx.Client, model_name: str) -> None:
    line = (
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi", "max_tokens": 1}}\n'
    )
    made = client.post("/files", files={"file": ("in.jsonl", line)}, data={"purpose": "batch"})
    file = FileObject.model_validate_json(made.content, strict=True)
    check(file)
    check(SyncCursorPage[FileObject].model_validate_json(client.get("/files").content, strict=True))
    body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = Batch.model_validate_json(post(client, "/batches", body).content, strict=True)
    check(batch)
    check(Batch.model_validate_json(client.get(f"/batches/{batch.id}").content, strict=True))
    check(SyncCursorPage[Batch].model_validate_json(client.get("/batches").content, strict=True))
    cancelled = client.post(f"/batches/{batch.id}/cancel")
    if cancelled.status_code == 200:  # it may have ended
        check(Batch.model_validate_json(cancelled.content, strict=True))
    deleted = client.delete(f"/files/{file.id}").content
    check(FileDeleted.model_validate_json(deleted, strict=True))
