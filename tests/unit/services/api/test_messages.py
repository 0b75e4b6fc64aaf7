"""Anthropic's messages and OpenAI's responses: translated into chats, and answered in their own shapes.

Every response is taken by the ``openai`` library's own models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import (
    CHATML,
    MODEL,
    Client,
    ScriptedBackend,
    application,
    client_on,
    delta,
    ok,
    read_events,
    refusal,
    write_model_dir,
)
from tests.unit.services.api.conftest import Connect

ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CACHED = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA, **CACHED}
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


async def test_a_message(client: Client, backend: ScriptedBackend) -> None:
    system = [{"type": "text", "text": "Be brief.", **CACHED}]
    fields = {"system": system, "stop_sequences": ["END"], "temperature": 0.5, "top_k": 7, "metadata": {"user_id": "u"}}
    reply = await ok(client, "/v1/messages", **ASK, **fields)
    assert reply.pop("id").startswith("msg_")
    usage = {"input_tokens": len(backend.calls[0][0]), "output_tokens": 4}
    assert reply.pop("usage") == usage | {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    assert reply.pop("content") == [{"type": "text", "text": "Hello!"}]
    ended = {"stop_reason": "end_turn", "stop_sequence": None}
    assert reply == {"type": "message", "role": "assistant", "model": MODEL, **ended}
    sampling = backend.calls[0][1]
    assert (sampling.stop, sampling.temperature, sampling.top_k, sampling.max_new_tokens) == (("END",), 0.5, 7, 20)
    text = backend.texts[0]
    assert text is not None and (text.instruction, text.user_input) == ("Be brief.", "hi")


async def test_a_message_that_uses_a_tool(connect: Connect) -> None:
    reply = await ok(connect(ScriptedBackend(CALLS)), "/v1/messages", **ASK, tools=[TOOL])
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
    client: Client, backend: ScriptedBackend, choice: dict[str, Any], is_forced: bool
) -> None:
    await ok(client, "/v1/messages", **ASK, system="Brief.", tools=[TOOL], tool_choice=choice)
    text = backend.texts[0]
    assert text is not None and text.instruction == "Brief."
    assert bool(backend.calls[0][1].grammar) is is_forced


async def test_a_conversation_with_results_of_tools(client: Client, backend: ScriptedBackend) -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    use = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]}
    said: list[tuple[Any, ...]] = [("user", {"type": "text", "text": "hi"}), ("assistant", thought, use)]
    said.append(("user", result, {"type": "text", "text": "and?"}))
    body: dict[str, Any] = {"messages": [{"role": role, "content": parts} for role, *parts in said], "tools": [TOOL]}
    await ok(client, "/v1/messages", **body, max_tokens=1)
    text = backend.texts[0]
    assert text is not None and text.user_input == "and?" and "sun" in text.instruction
    counted = await ok(client, "/v1/messages/count_tokens", **body)
    assert counted == {"input_tokens": len(backend.calls[0][0])}


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


async def test_integers_of_any_size_may_stand_in_a_schema(client: Client) -> None:
    tool = {"name": "f", "input_schema": {"type": "object", "minProperties": 2**64, "maxProperties": 2**200}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "tools": [tool]}
    assert (await ok(client, "/v1/messages/count_tokens", **body))["input_tokens"] > 0


@pytest.mark.parametrize(("fields", "words"), REFUSED)
async def test_errors_have_the_shape_of_anthropic(client: Client, fields: dict[str, Any], words: str) -> None:
    response = await client.post("/v1/messages", json={**ASK, **fields})
    assert response.status_code in (400, 404), response.text
    reply = response.json()
    assert reply["type"] == "error" and words in reply["error"]["message"]
    assert reply["error"]["type"] == ("not_found_error" if response.status_code == 404 else "invalid_request_error")


async def test_every_layer_refuses_in_that_shape(client: Client) -> None:
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


async def test_a_large_message_is_read_and_counted(client: Client, backend: ScriptedBackend) -> None:
    large = {**ASK, "metadata": {"user_id": "x" * 70_000}}
    response = await client.post("/v1/messages", json=large)
    assert response.status_code == 200 and response.json()["content"][0]["text"] == "Hello!"
    response = await client.post("/v1/messages", json={**large, "max_tokens": 0})
    assert response.json()["error"]["type"] == "invalid_request_error"
    counted = json.dumps({"messages": ASK["messages"]}) + " " * 70_000
    headers = {"content-type": "application/json"}
    response = await client.post("/v1/messages/count_tokens", content=counted, headers=headers)
    assert response.json() == {"input_tokens": len(backend.calls[0][0])}


ASK_RESPONSE: dict[str, Any] = {"model": MODEL, "input": "hi"}
FUNCTION = {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
CITIES = ("Rome", "Oslo")
SEVERAL = "\n".join(CALL.replace("Rome", city) for city in CITIES)
TWO_CALLS = [delta("Let me see. "), *(delta(char) for char in SEVERAL), delta("", "stop")]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def strict(reply: Any) -> Response:
    """The library's model, with the types as they stand; the name of a model is any."""
    return Response.model_validate_json(json.dumps(reply), strict=True)


def response_events(body: str) -> list[Any]:
    found: list[Any] = []
    for block in filter(None, body.split("\n\n")):
        name, data = block.split("\n")
        event = EVENTS.validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event.type}" and event.sequence_number == len(found)
        found.append(event)
    return found


async def test_a_response(client: Client, backend: ScriptedBackend) -> None:
    fields = {"instructions": "Be brief.", "max_output_tokens": 9, "temperature": 0.5, "metadata": {"a": "b"}}
    response = strict(await ok(client, "/v1/responses", **ASK_RESPONSE, **fields))
    assert response.output_text == "Hello!" and response.status == "completed" and response.id.startswith("resp_")
    assert (response.metadata, response.max_output_tokens, response.temperature) == ({"a": "b"}, 9, 0.5)
    assert response.usage is not None and response.usage.output_tokens == 4
    sampling = backend.calls[0][1]
    assert (sampling.max_new_tokens, sampling.temperature) == (9, 0.5)
    text = backend.texts[0]
    assert text is not None and (text.instruction, text.user_input) == ("Be brief.", "hi")


async def test_a_response_and_its_events_call_functions(connect: Connect) -> None:
    body = {**ASK_RESPONSE, "tools": [FUNCTION]}
    response = strict(await ok(connect(ScriptedBackend(TWO_CALLS)), "/v1/responses", **body))
    message, *calls = response.output
    assert message.type == "message" and response.output_text == "Let me see."
    assert [(call.type, getattr(call, "name", "")) for call in calls] == [("function_call", "get_weather")] * 2
    assert [json.loads(getattr(call, "arguments", "")) for call in calls] == [{"city": city} for city in CITIES]
    answer = await connect(ScriptedBackend(TWO_CALLS)).post("/v1/responses", json={**body, "stream": True})
    events = response_events(answer.text)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.completed"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in last.response.output]
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert arguments == "".join(json.dumps({"city": city}) for city in CITIES)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "Let me see."


async def test_reasoning_is_an_item(tmp_path: Path) -> None:
    encoder = PromptEncoder(write_model_dir(tmp_path, CHATML + "{# </think> #}"))
    script = [delta("<think>\nHm"), delta(".\n</think>\n\nFour"), delta(".", "length")]
    client = client_on(application(ScriptedBackend(script), encoder))
    response = strict(await ok(client, "/v1/responses", **ASK_RESPONSE))
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text == "Four." and response.status == "incomplete"
    assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens > 0
    events = response_events((await client.post("/v1/responses", json={**ASK_RESPONSE, "stream": True})).text)
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "Hm." and events[-1].type == "response.incomplete"
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    message = (await ok(client, "/v1/chat/completions", **chat))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Four.")
    hidden = await ok(client, "/v1/chat/completions", **chat, include_reasoning=False)
    assert "reasoning_content" not in hidden["choices"][0]["message"]


async def test_a_conversation_of_items(client: Client, backend: ScriptedBackend) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "message", "role": "user", "content": "and?"},
    ]
    await ok(client, "/v1/responses", input=items, tools=[FUNCTION], max_output_tokens=1)
    text = backend.texts[0]
    assert text is not None and text.user_input == "and?" and "sun" in text.instruction


async def test_text_of_a_schema(client: Client, backend: ScriptedBackend) -> None:
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    answer = await ok(client, "/v1/responses", **ASK_RESPONSE, text={"format": form})
    assert backend.calls[0][1].grammar and strict(answer).text is not None


PYTHON = {"type": "custom", "name": "python", "description": "Runs it."}
OF_LETTERS = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
CODE = 'print("é\\n")'
CUSTOM_CALL = f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'input': CODE}})}\n</tool_call>"


async def test_a_custom_tool_of_a_response(connect: Connect) -> None:
    backend = ScriptedBackend([*(delta(char) for char in CUSTOM_CALL), delta("", "stop")])
    body = {**ASK_RESPONSE, "tools": [PYTHON, FUNCTION]}
    response = strict(await ok(connect(backend), "/v1/responses", **body))
    [call] = response.output
    assert (call.type, getattr(call, "name", ""), getattr(call, "input", "")) == ("custom_tool_call", "python", CODE)
    answer = await connect(backend).post("/v1/responses", json={**body, "stream": True})
    events = response_events(answer.text)
    written = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(written) == CODE
    [done] = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
    assert done == CODE and events[-1].response.output[0].input == CODE
    items = [
        {"role": "user", "content": "hi"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "python", "input": CODE},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    await ok(connect(backend), "/v1/responses", input=items, tools=[PYTHON], max_output_tokens=1)
    text = backend.texts[-1]
    assert text is not None and "done" in text.instruction + text.user_input + str(text.source)


@pytest.mark.parametrize(
    ("choice", "is_forced", "says", "lacks"),
    [
        ({"type": "custom", "name": "python"}, True, "python", "get_weather"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "python"}]},
            True,
            "python",
            "get_weather",
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]},
            False,
            "get_weather",
            "python",
        ),
    ],
)
async def test_the_tools_that_may_be_called(
    client: Client, backend: ScriptedBackend, choice: dict[str, Any], is_forced: bool, says: str, lacks: str
) -> None:
    tools = [{**PYTHON, "format": OF_LETTERS}, FUNCTION]
    answer = strict(await ok(client, "/v1/responses", **ASK_RESPONSE, tools=tools, tool_choice=choice))
    grammar = backend.calls[0][1].grammar
    assert says in grammar and lacks not in grammar and ("TEXT" in grammar) is not is_forced
    assert ("a-z" in grammar) == (says == "python"), "the input follows its expression"
    assert answer.tool_choice is not None and len(answer.tools) == 2


async def test_a_custom_tool_of_a_chat(connect: Connect) -> None:
    custom = {"type": "custom", "custom": {"name": "python", "description": "Runs it."}}
    call = {"id": "c1", "type": "custom", "custom": {"name": "python", "input": CODE}}
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    backend = ScriptedBackend([*(delta(char) for char in CUSTOM_CALL), delta("", "stop")])
    body: dict[str, Any] = {"messages": [*said, result], "tools": [custom]}
    [choice] = (await ok(connect(backend), "/v1/chat/completions", **body))["choices"]
    [made] = choice["message"]["tool_calls"]
    assert made.pop("id") and made == {"type": "custom", "custom": {"name": "python", "input": CODE}}
    assert choice["finish_reason"] == "tool_calls"
    answer = await connect(backend).post("/v1/chat/completions", json={**body, "stream": True})
    deltas = [each["choices"][0]["delta"] for each in read_events(answer.text)]
    calls = [call for each in deltas for call in each.get("tool_calls", ())]
    assert calls[0]["custom"]["name"] == "python" and "".join(each["custom"]["input"] for each in calls) == CODE


REFUSED_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [FUNCTION, FUNCTION]}, "each name once"),
    ({"tools": [PYTHON], "tool_choice": {"type": "function", "name": "python"}}, "tool_choice.function.name"),
    (
        {
            "tools": [PYTHON],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "f"}]},
        },
        "tool_choice.allowed_tools.tools[0].custom.name: got 'f', expected one of ['python']",
    ),
    ({"tools": [{**PYTHON, "format": {**OF_LETTERS, "syntax": "lark"}}]}, "expected 'regex'"),
    ({"tools": [{**PYTHON, "format": {**OF_LETTERS, "definition": "("}}], "tool_choice": "required"}, "tools[0]"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"top_logprobs": 3}, "top_logprobs"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED_RESPONSES)
async def test_what_is_not_supported_is_refused(client: Client, fields: dict[str, Any], words: str) -> None:
    assert words in (await refusal(client, "/v1/responses", **{**ASK_RESPONSE, **fields}))["message"]


async def test_a_failure_in_a_stream_of_a_response_is_told(connect: Connect) -> None:
    backend = ScriptedBackend([delta("a"), delta("", "error", error="the replica has ended")])
    answer = await connect(backend).post("/v1/responses", json={**ASK_RESPONSE, "stream": True})
    last = response_events(answer.text)[-1]
    assert last.type == "response.failed" and "the replica has ended" in last.response.error.message
