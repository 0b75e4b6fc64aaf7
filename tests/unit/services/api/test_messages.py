"""Anthropic's messages: translated into chats, answered in Anthropic's shapes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.unit.services.api.api_support import MODEL, ScriptedBackend, delta
from tests.unit.services.api.conftest import Connect

ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALLS = [delta("Let me see. "), *(delta(char) for char in CALL), delta("", "stop")]


def events_of(body: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in filter(None, body.split("\n\n")):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append((value["type"], value))
    return found


async def test_a_message(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    body = {
        **ASK,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "stop_sequences": ["END"],
        "temperature": 0.5,
        "top_k": 7,
        "metadata": {"user_id": "u"},
    }
    response = await client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    reply = response.json()
    assert reply.pop("id").startswith("msg_")
    assert reply == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hello!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(backend.calls[0][0]),
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "output_tokens": 4,
        },
    }
    sampling = backend.calls[0][1]
    assert (sampling.stop, sampling.temperature, sampling.top_k, sampling.max_new_tokens) == (("END",), 0.5, 7, 20)
    text = backend.texts[0]
    assert text is not None and (text.instruction, text.user_input) == ("Be brief.", "hi")


async def test_a_message_that_uses_a_tool(connect: Connect) -> None:
    client = connect(ScriptedBackend(CALLS))
    reply = (await client.post("/v1/messages", json={**ASK, "tools": [TOOL]})).json()
    assert reply["stop_reason"] == "tool_use"
    text, call = reply["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert call.pop("id") and call == {"type": "tool_use", "name": "get_weather", "input": {"city": "Rome"}}


async def test_the_events_of_a_message(connect: Connect) -> None:
    client = connect(ScriptedBackend(CALLS))
    response = await client.post("/v1/messages", json={**ASK, "tools": [TOOL], "stream": True})
    events = events_of(response.text)
    kinds = [kind for kind, _ in events if kind != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]
    deltas = [value["delta"] for kind, value in events if kind == "content_block_delta"]
    assert "".join(each.get("text", "") for each in deltas) == "Let me see."
    assert json.loads("".join(each.get("partial_json", "") for each in deltas)) == {"city": "Rome"}
    last = events[-2][1]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == len(CALLS)


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [({"type": "any"}, True), ({"type": "tool", "name": "get_weather"}, True), ({"type": "auto"}, False)],
)
async def test_the_choice_of_a_tool(
    client: httpx.AsyncClient, backend: ScriptedBackend, choice: dict[str, Any], is_forced: bool
) -> None:
    response = await client.post("/v1/messages", json={**ASK, "tools": [TOOL], "tool_choice": choice})
    assert response.status_code == 200, response.text
    assert bool(backend.calls[0][1].grammar) is is_forced


async def test_a_conversation_with_results_of_tools(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    body = {**ASK, "messages": messages, "tools": [TOOL], "max_tokens": 1}
    assert (await client.post("/v1/messages", json=body)).status_code == 200
    text = backend.texts[0]
    assert text is not None and text.user_input == "and?" and "sun" in text.instruction
    counted = await client.post("/v1/messages/count_tokens", json={key: body[key] for key in ("messages", "tools")})
    assert counted.json() == {"input_tokens": len(backend.calls[0][0])}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]}, "tool_use"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "each name once"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "f"),
    ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
    ({"temperature": 3}, "temperature"),
    ({"model": "other"}, "other"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
async def test_errors_have_the_shape_of_anthropic(
    client: httpx.AsyncClient, fields: dict[str, Any], words: str
) -> None:
    response = await client.post("/v1/messages", json={**ASK, **fields})
    assert response.status_code in (400, 404), response.text
    reply = response.json()
    assert reply["type"] == "error" and words in reply["error"]["message"]
    assert reply["error"]["type"] == ("not_found_error" if response.status_code == 404 else "invalid_request_error")


async def test_every_layer_refuses_in_that_shape(client: httpx.AsyncClient) -> None:
    for content, status, kind in ((b"{", 400, "invalid_request_error"), (b"x" * 200_000, 413, "request_too_large")):
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/messages", content=content, headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert (await client.get("/v1/messages/batches")).json()["error"]["type"] == "not_found_error"
    assert "param" in (await client.post("/v1/completions", json={})).json()["error"]


async def test_a_failure_in_a_stream_is_an_event(connect: Connect) -> None:
    backend = ScriptedBackend([delta("a"), delta("", "error", error="the replica has ended")])
    response = await connect(backend).post("/v1/messages", json={**ASK, "stream": True})
    kind, value = events_of(response.text)[-1]
    assert kind == "error" and value["error"]["type"] == "overloaded_error"


async def test_a_large_message_is_read_and_counted(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    large = {**ASK, "metadata": {"user_id": "x" * 70_000}}
    response = await client.post("/v1/messages", json=large)
    assert response.status_code == 200 and response.json()["content"][0]["text"] == "Hello!"
    response = await client.post("/v1/messages", json={**large, "max_tokens": 0})
    assert response.json()["error"]["type"] == "invalid_request_error"
