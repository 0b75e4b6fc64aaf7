"""Pictures in Anthropic's messages and in responses, in what tools answer, in counts of tokens and nowhere else."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.images import digest_of
from tests.unit.services.api.api_support import IMAGE_TOKENS, MODEL, ScriptedBackend
from tests.unit.services.api.test_pictures import (
    FILE,
    PARTS,
    chat,
    client_of,
    image,
    placeholder_id,
    seeing_backend,
    seeing_dir,
    text,
    url_of,
)

OTHER = b"GIF89a of some kind"
URL = "https://pictures.example/a.png?signature=1"
TOOLS = "{% for message in messages if message.tool_calls %}called {% endfor %}" + PARTS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return seeing_dir(tmp_path, TOOLS)


@pytest.fixture
def backend(folder: Path) -> ScriptedBackend:
    return seeing_backend(folder, max_model_len=400)


def block(source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


def given(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    return block({"type": "base64", "media_type": kind, "data": base64.b64encode(data).decode()})


def message(*content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": list(content)}], **fields}


def response(*content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": [{"role": "user", "content": list(content)}], **fields}


async def seen(backend: ScriptedBackend, folder: Path, path: str, body: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What the backend was shown; the prompt has the tokens of these pictures, in one place each."""
    async with client_of(backend, folder) as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    [(prompt_ids, _)] = backend.calls
    assert prompt_ids.count(placeholder_id(folder)) == IMAGE_TOKENS * len(backend.seen)
    return [(file.field, file.url or file.data) for file, _ in backend.seen]


async def test_anthropic_blocks_of_both_sources(backend: ScriptedBackend, folder: Path) -> None:
    body = message(text("see"), given(FILE), block({"type": "url", "url": URL}), text("and"), given(OTHER, "image/gif"))
    assert await seen(backend, folder, "/v1/messages", body) == [
        ("messages[0].content[1].source.data", FILE),
        ("messages[0].content[2].source.url", URL),
        ("messages[0].content[4].source.data", OTHER),
    ]
    assert [each.digest for each in backend.images[0]][::2] == [digest_of(FILE), digest_of(OTHER)]


async def test_a_tool_may_answer_a_picture(backend: ScriptedBackend, folder: Path) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("found"), given(FILE)]}
    body = message(text("look"))
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    body["messages"] += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert await seen(backend, folder, "/v1/messages", body) == [
        ("messages[2].content[0].content[1].source.data", FILE)
    ]


async def test_responses_take_pictures_of_messages_and_of_tools(backend: ScriptedBackend, folder: Path) -> None:
    part = {"type": "input_image", "image_url": url_of(FILE), "detail": "high"}
    body = response({"type": "input_text", "text": "see"}, part, {"type": "input_image", "image_url": URL})
    body["input"] += [
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_image", "image_url": url_of(OTHER)}],
        },
    ]
    assert await seen(backend, folder, "/v1/responses", body) == [
        ("input[0].content[1].image_url", FILE),
        ("input[0].content[2].image_url", URL),
        ("input[2].output[0].image_url", OTHER),
    ]


REFUSED = [
    (block(None), "source.type"),
    (block({"type": "file", "file_id": "file_1"}), "source.type"),
    (given(FILE, "image/tiff"), "source.media_type"),
    (given(FILE, "text/html"), "source.media_type"),
    (block({"type": "base64", "media_type": "image/png"}), "source.data"),
    (block({"type": "base64", "media_type": "image/png", "data": "no base64!"}), "source.data"),
    (block({"type": "base64", "media_type": "image/png", "data": ""}), "source.data"),
    (block({"type": "base64", "media_type": "image/png", "data": "AAAA", "url": URL}), "source.url"),
    (block({"type": "url", "url": "file:///etc/passwd"}), "source.url"),
    (block({"type": "url", "url": url_of(FILE)}), "source.url"),
    (block({"type": "url"}), "source.url"),
]


@pytest.mark.parametrize(("part", "field"), REFUSED)
async def test_wrong_blocks_are_refused_with_their_field(
    backend: ScriptedBackend, folder: Path, part: dict[str, Any], field: str
) -> None:
    async with client_of(backend, folder) as client:
        reply = await client.post("/v1/messages", json=message(part))
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == f"messages[0].content[0].{field}"
    assert not backend.seen


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "input_image"}, "image_url"),
        ({"type": "input_image", "image_url": "file:///etc/passwd"}, "image_url"),
        ({"type": "input_image", "image_url": "data:text/html;base64,AAAA"}, "image_url"),
        ({"type": "input_image", "image_url": url_of(FILE), "detail": "all"}, "detail"),
        ({"type": "input_image", "file_id": "file_1"}, "file_id"),
    ],
)
async def test_wrong_parts_of_responses_are_refused(
    backend: ScriptedBackend, folder: Path, part: dict[str, Any], field: str
) -> None:
    async with client_of(backend, folder) as client:
        reply = await client.post("/v1/responses", json=response(part))
    assert reply.status_code == 400, reply.text
    assert f"[0].{field}: got" in reply.json()["error"]["message"]


async def test_an_assistant_shows_no_pictures(backend: ScriptedBackend, folder: Path) -> None:
    body = message(text("see"))
    body["messages"] += [{"role": "assistant", "content": [given(FILE)]}, {"role": "user", "content": "?"}]
    async with client_of(backend, folder) as client:
        reply = await client.post("/v1/messages", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages[1].content[0].type")
        part = {"type": "input_image", "image_url": url_of(FILE)}
        reply = await client.post("/v1/responses", json={"input": [{"role": "assistant", "content": [part]}]})
        assert reply.status_code == 400, reply.text


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/messages/count_tokens", "/tokenize"])
async def test_a_model_that_reads_text_refuses_pictures_of_every_dialect(path: str, folder: Path) -> None:
    bodies = {
        "/v1/messages": message(given(FILE)),
        "/v1/responses": response({"type": "input_image", "image_url": url_of(FILE)}),
        "/v1/messages/count_tokens": {"messages": message(given(FILE))["messages"]},
        "/tokenize": {"messages": chat(image())["messages"]},
    }
    async with client_of(ScriptedBackend(), folder) as client:
        reply = await client.post(path, json=bodies[path])
    assert reply.status_code == 400, reply.text
    assert "text alone is read here" in reply.json()["error"]["message"]


async def test_counted_tokens_are_those_of_the_message(backend: ScriptedBackend, folder: Path) -> None:
    body = message(text("see"), given(FILE), text("and"), given(OTHER))
    counted = {name: value for name, value in body.items() if name != "max_tokens"}
    async with client_of(backend, folder) as client:
        count = (await client.post("/v1/messages/count_tokens", json=counted)).json()["input_tokens"]
        used = (await client.post("/v1/messages", json=body)).json()["usage"]
    assert count == used["input_tokens"] + used["cache_read_input_tokens"] > 2 * IMAGE_TOKENS
    assert len({salt for _, salt in backend.seen}) == 1, "the message finds what the count has had encoded"


@pytest.mark.parametrize("size", [20, 100_000])
async def test_tokens_of_a_chat_are_those_of_its_prompt(backend: ScriptedBackend, folder: Path, size: int) -> None:
    """Also of one whose picture is larger than other bodies may be."""
    body = chat(text("see"), image(bytes(range(256)) * size if size < 256 else bytes(size)))
    async with client_of(backend, folder) as client:
        found = (await client.post("/tokenize", json={"messages": body["messages"]})).json()
        reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert tuple(found["tokens"]) == tuple(backend.calls[0][0])
    assert found["count"] == reply.json()["usage"]["prompt_tokens"]


async def test_large_bodies_without_pictures_are_not_tokenised(folder: Path) -> None:
    async with client_of(ScriptedBackend(), folder) as client:
        reply = await client.post("/tokenize", json={"prompt": "a" * 100_000})
    assert reply.status_code == 413


async def test_large_messages_and_responses_are_read(backend: ScriptedBackend, folder: Path) -> None:
    data = bytes(range(256)) * 400
    assert await seen(backend, folder, "/v1/messages", message(given(data))) == [
        ("messages[0].content[0].source.data", data)
    ]
    again = seeing_backend(folder, max_model_len=400)
    part = {"type": "input_image", "image_url": url_of(data)}
    assert await seen(again, folder, "/v1/responses", response(part)) == [("input[0].content[0].image_url", data)]


async def test_completions_have_no_place_for_a_picture(backend: ScriptedBackend, folder: Path) -> None:
    for fields in ({"images": [url_of(FILE)]}, {"multi_modal_data": {"image": url_of(FILE)}}):
        async with client_of(backend, folder) as client:
            reply = await client.post("/v1/completions", json={"prompt": "see", **fields})
        assert reply.status_code == 400, httpx.codes(reply.status_code)
        assert reply.json()["error"]["code"] == "unknown_parameter"
