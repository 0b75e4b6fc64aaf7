"""Responses: translated into chats, and every reply taken by the ``openai`` library's own models."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import CHATML, MODEL, ScriptedBackend, application, delta, write_model_dir
from tests.unit.services.api.conftest import Connect

ASK: dict[str, Any] = {"model": MODEL, "input": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CITIES = ("Rome", "Oslo")
SEVERAL = "\n".join(CALL.replace("Rome", city) for city in CITIES)
CALLS = [delta("Let me see. "), *(delta(char) for char in SEVERAL), delta("", "stop")]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def strict(reply: Any) -> Response:
    """The library's model, with the types as they stand; the name of a model is any."""
    return Response.model_validate_json(json.dumps(reply), strict=True)


def events_of(body: str) -> list[Any]:
    found: list[Any] = []
    for block in filter(None, body.split("\n\n")):
        name, data = block.split("\n")
        event = EVENTS.validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event.type}" and event.sequence_number == len(found)
        found.append(event)
    return found


async def test_a_response(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    body = {**ASK, "instructions": "Be brief.", "max_output_tokens": 9, "temperature": 0.5, "metadata": {"a": "b"}}
    answer = await client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    response = strict(answer.json())
    assert response.output_text == "Hello!" and response.status == "completed" and response.id.startswith("resp_")
    assert (response.metadata, response.max_output_tokens, response.temperature) == ({"a": "b"}, 9, 0.5)
    assert response.usage is not None and response.usage.output_tokens == 4
    sampling = backend.calls[0][1]
    assert (sampling.max_new_tokens, sampling.temperature) == (9, 0.5)
    text = backend.texts[0]
    assert text is not None and (text.instruction, text.user_input) == ("Be brief.", "hi")


async def test_a_response_that_calls_functions(connect: Connect) -> None:
    answer = await connect(ScriptedBackend(CALLS)).post("/v1/responses", json={**ASK, "tools": [TOOL]})
    response = strict(answer.json())
    message, *calls = response.output
    assert message.type == "message" and response.output_text == "Let me see."
    assert [(call.type, getattr(call, "name", "")) for call in calls] == [("function_call", "get_weather")] * 2
    assert [json.loads(getattr(call, "arguments", "")) for call in calls] == [{"city": city} for city in CITIES]


async def test_the_events_say_the_same(connect: Connect) -> None:
    body = {**ASK, "tools": [TOOL]}
    whole = (await connect(ScriptedBackend(CALLS)).post("/v1/responses", json=body)).json()
    answer = await connect(ScriptedBackend(CALLS)).post("/v1/responses", json={**body, "stream": True})
    events = events_of(answer.text)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.completed"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in last.response.output]
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert arguments == "".join(json.dumps({"city": city}) for city in CITIES)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == strict(whole).output_text


async def test_reasoning_is_an_item(tmp_path: Any) -> None:

    encoder = PromptEncoder(write_model_dir(tmp_path, CHATML + "{# </think> #}"))
    script = [delta("<think>\nHm"), delta(".\n</think>\n\nFour"), delta(".", "length")]
    transport = httpx.ASGITransport(application(ScriptedBackend(script), encoder))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = strict((await client.post("/v1/responses", json=ASK)).json())
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert response.output_text == "Four." and response.status == "incomplete"
        assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens > 0
        events = events_of((await client.post("/v1/responses", json={**ASK, "stream": True})).text)
        thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(thoughts) == "Hm." and events[-1].type == "response.incomplete"
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        message = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Four.")
        hidden = await client.post("/v1/chat/completions", json={**chat, "include_reasoning": False})
        assert "reasoning_content" not in hidden.json()["choices"][0]["message"]


async def test_a_conversation_of_items(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "message", "role": "user", "content": "and?"},
    ]
    answer = await client.post("/v1/responses", json={**ASK, "input": items, "tools": [TOOL], "max_output_tokens": 1})
    assert answer.status_code == 200, answer.text
    text = backend.texts[0]
    assert text is not None and text.user_input == "and?" and "sun" in text.instruction


async def test_text_of_a_schema(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    answer = await client.post("/v1/responses", json={**ASK, "text": {"format": form}})
    assert answer.status_code == 200, answer.text
    assert backend.calls[0][1].grammar and strict(answer.json()).text is not None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [TOOL, TOOL]}, "each name once"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"top_logprobs": 3}, "top_logprobs"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
async def test_what_is_not_supported_is_refused(client: httpx.AsyncClient, fields: dict[str, Any], words: str) -> None:
    answer = await client.post("/v1/responses", json={**ASK, **fields})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


async def test_a_failure_in_a_stream_is_told(connect: Connect) -> None:
    backend = ScriptedBackend([delta("a"), delta("", "error", error="the replica has ended")])
    answer = await connect(backend).post("/v1/responses", json={**ASK, "stream": True})
    last = events_of(answer.text)[-1]
    assert last.type == "response.failed" and "the replica has ended" in last.response.error.message
