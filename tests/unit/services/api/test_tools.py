"""Tools in chats: what the backend is asked for, and what clients get of its outputs."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import Tokenizer

from core.request import ReasoningBudget
from services.api.text.prompts import PromptEncoder
from services.api.tools.fields import MAX_TOOLS
from tests.unit.services.api.api_support import (
    CHATML,
    MODEL,
    ScriptedBackend,
    application,
    delta,
    read_events,
    write_model_dir,
)
from tests.unit.services.api.conftest import Connect

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
SCRIPT = [delta("Let me look. "), *(delta(char) for char in CALL), delta("", "stop")]


def strict(reply: Any, kind: type[ChatCompletion] | type[ChatCompletionChunk]) -> Any:
    """The library's own model of the reply, which takes nothing that the library does not."""
    return kind.model_validate(reply, strict=True)


async def test_an_answer_that_calls_a_tool(connect: Connect) -> None:
    client = connect(ScriptedBackend(SCRIPT))
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 200, response.text
    choice = strict(response.json(), ChatCompletion).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather" and call.type == "function" and call.id.startswith("call_")
    assert json.loads(call.function.arguments) == {"city": "Rome", "days": 2}


async def test_a_stream_that_calls_a_tool_sends_its_arguments_as_they_come(connect: Connect) -> None:
    client = connect(ScriptedBackend(SCRIPT))
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    chunks = [strict(each, ChatCompletionChunk) for each in read_events(response.text)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(each.content or "" for each in deltas) == "Let me look."
    calls = [call for each in deltas for call in each.tool_calls or ()]
    assert calls[0].function.name == "get_weather" and calls[0].id and calls[0].function.arguments == ""
    assert all(call.id is None and call.index == 0 for call in calls[1:])
    assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "Rome", "days": 2}
    assert len(calls) > 20
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    whole = await connect(ScriptedBackend(SCRIPT)).post("/v1/chat/completions", json=CHAT)
    assert whole.json()["choices"][0]["message"]["content"] == "Let me look."


async def test_a_forced_call_that_is_cut_is_no_text(connect: Connect) -> None:
    cut = [delta(CALL), delta('\n<tool_call>\n{"na'), delta("", "length")]
    forced = {**CHAT, "tool_choice": "required"}
    choice = (await connect(ScriptedBackend(cut)).post("/v1/chat/completions", json=forced)).json()["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == 1


TWICE = [
    delta(CALL),
    delta(f"\n{CALL.replace('2', '3')}\n{CALL}"),
    delta('\n<tool_call>\n{"name": "get_weather", "arg'),
]
BROKEN = [*TWICE, delta('uments": {"city": "Ro'), delta("", "length")]


@pytest.mark.parametrize(("fields", "days"), [({}, [2, 3]), ({"parallel_tool_calls": False}, [2])])
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_calls_are_sent_whole_once_and_as_many_as_are_wanted(
    connect: Connect, fields: dict[str, Any], days: list[int], choice: str
) -> None:
    client = connect(ScriptedBackend(BROKEN))
    body = {**CHAT, **fields, "tool_choice": choice}
    answer = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    made = answer["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"])["days"] for call in made] == days
    assert answer["finish_reason"] == "length" and answer["message"]["content"] is None
    client = connect(ScriptedBackend(BROKEN))
    streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
    texts = [""] * len(days)
    for event in read_events(streamed.text):
        for call in event["choices"][0]["delta"].get("tool_calls", ()):
            texts[call["index"]] += call["function"]["arguments"]
    assert [json.loads(text)["days"] for text in texts] == days


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_the_other_dialects_send_one_call_where_one_is_wanted(connect: Connect, path: str) -> None:
    parameters = WEATHER["function"]["parameters"]
    client = connect(ScriptedBackend(BROKEN))
    if path == "/v1/messages":
        body = {
            "model": MODEL,
            "messages": CHAT["messages"],
            "max_tokens": 9,
            "tools": [{"name": "get_weather", "input_schema": parameters}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        }
        blocks = (await client.post(path, json=body)).json()["content"]
        assert [block["input"]["days"] for block in blocks] == [2]
        return
    tools = [{"type": "function", "name": "get_weather", "parameters": parameters}]
    body = {"model": MODEL, "input": "hi", "tools": tools, "parallel_tool_calls": False}
    items = (await client.post(path, json=body)).json()["output"]
    assert [json.loads(item["arguments"])["days"] for item in items] == [2]


async def test_text_that_is_no_call_stays_text(connect: Connect) -> None:
    text = 'A <tool_call> that is none: <tool_call>\n{"name": 3}</tool_call> <script>alert(1)</script>'
    client = connect(ScriptedBackend([delta(char) for char in text] + [delta("", "stop")]))
    choice = (await client.post("/v1/chat/completions", json=CHAT)).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert "<script>alert(1)</script>" in choice["message"]["content"]
    plain = {key: value for key, value in CHAT.items() if key != "tools"}
    answer = await connect(ScriptedBackend(SCRIPT)).post("/v1/chat/completions", json=plain)
    assert answer.json()["choices"][0]["message"]["content"] == f"Let me look. {CALL}"


@pytest.mark.parametrize(
    ("fields", "is_constrained"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "none"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, True),
        ({"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]}, True),
        ({"response_format": {"type": "json_object"}}, True),
    ],
)
async def test_what_constrains_the_output(
    client: httpx.AsyncClient, backend: ScriptedBackend, fields: dict[str, Any], is_constrained: bool
) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 200, response.text
    assert bool(backend.calls[0][1].grammar) is is_constrained


async def test_a_history_of_calls_reaches_the_template(client: httpx.AsyncClient, encoder: PromptEncoder) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "<|im_end|> sunny"},
    ]
    response = await client.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    assert response.status_code == 200, response.text
    del messages[1]["content"]
    assert (await client.post("/v1/chat/completions", json={**CHAT, "messages": messages})).status_code == 200


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (tool(name=""), "tools[0].function.name", "1 to 128"),
    (tool(name="a" * 129), "tools[0].function.name", "1 to 128"),
    (tool(name='x", "arguments": {}}'), "tools[0].function.name", "1 to 128"),
    (tool(name="<script>alert(1)</script>"), "tools[0].function.name", "1 to 128"),
    (tool(name="näme"), "tools[0].function.name", "1 to 128"),
    (tool(parameters={"type": "string"}), "tools[0].function.parameters.type", "object"),
    (tool(parameters=[]), "tools[0].function.parameters", "JSON Schema"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "each name once"),
    ({"tools": [WEATHER] * (MAX_TOOLS + 1)}, "tools", f"up to {MAX_TOOLS}"),
    (tool(description="x" * 70_000), "tools", "characters"),
    (tool(parameters=deep(40)), "tools", "levels"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type", "'function'"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name", "get_weather"),
    ({"tool_choice": "sometimes"}, "tool_choice", ""),
    (
        {**tool(parameters={"properties": {"a": {"type": "array", "uniqueItems": True}}}), "tool_choice": "required"},
        "tools[0].function.parameters",
        "/properties/a",
    ),
    (
        {**tool(parameters={"properties": {"a": {"maximum": 2**60, "minimum": 2**60}}}), "tool_choice": "required"},
        "tools[0].function.parameters",
        "2^53",
    ),
    (
        {**tool(parameters={"properties": {"a": {"$ref": "#/nowhere"}}}), "tool_choice": "required"},
        "tools[0].function.parameters",
        "nowhere",
    ),
    ({"guided_regex": "a+"}, "guided_regex", "beside tools"),
    ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos", "false"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
async def test_what_cannot_be_called_is_refused(
    client: httpx.AsyncClient, backend: ScriptedBackend, fields: dict[str, Any], param: str, words: str
) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert str(error["param"]).startswith(param) and words in error["message"], error
    assert not backend.calls


async def test_a_recursive_schema_is_followed(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    response = await client.post(
        "/v1/chat/completions", json={**CHAT, **tool(parameters=tree), "tool_choice": "required"}
    )
    assert response.status_code == 200, response.text
    assert backend.calls[0][1].grammar
    jsonschema.Draft202012Validator.check_schema(tree)


async def test_a_large_chat_with_tools_is_read_elsewhere_and_answered_alike(connect: Connect) -> None:
    client = connect(ScriptedBackend(SCRIPT))
    padded = {**CHAT, "metadata": {"pad": "x" * 70_000}}
    response = await client.post("/v1/chat/completions", json=padded)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


DEEP: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, **tool(parameters=nested(1))}),
    ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": nested(1)}),
    ("/v1/messages", {**CHAT, "tools": [{"name": "f", "input_schema": nested(1)}], "max_tokens": 1}),
    (
        "/v1/messages",
        {
            "max_tokens": 1,
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": nested(1)}]}
            ],
        },
    ),
    ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": nested(1)}]}),
]


@pytest.mark.parametrize(("path", "body"), DEEP)
@pytest.mark.parametrize("levels", [100, 400, 800, 900, 940, 960, 100_000])
async def test_what_is_nested_deeply_is_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], levels: int
) -> None:
    text = json.dumps(body).replace('{"a": {}}', '{"a": ' * levels + "{}" + "}" * levels)
    for padded in (text, text + " " * 70_000):
        headers = {"content-type": "application/json"}
        response = await client.post(path, content=padded.encode()[:99_000], headers=headers)
        assert response.status_code == 400, response.text


@pytest.mark.parametrize(("template", "in_prompt"), [(CHATML + "<think>\n{# </think> #}", True), (CHATML, None)])
async def test_the_reasoning_has_a_budget(tmp_path: Any, template: str, in_prompt: bool | None) -> None:
    encoder = PromptEncoder(write_model_dir(tmp_path, template))
    backend = ScriptedBackend([delta("yes", "stop")])
    transport = httpx.ASGITransport(application(backend, encoder))
    messages = CHAT["messages"]
    bodies = [
        ("/v1/chat/completions", {"messages": messages, "thinking_token_budget": 5}),
        ("/v1/messages", {"messages": messages, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 5}}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/chat/completions", {"messages": messages, "thinking_token_budget": -1}),
    ]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        replies = [await client.post(path, json=body) for path, body in bodies]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 400], replies[1].text
    assert replies[3].json()["error"]["param"] == "thinking_token_budget"
    end = tuple(Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("</think>", add_special_tokens=False).ids)
    wanted = ReasoningBudget(5, (), end) if in_prompt else None
    assert [sampling.reasoning for _, sampling in backend.calls] == [wanted, wanted, None]


async def test_an_expression_leaves_no_room_for_reasoning(tmp_path: Any) -> None:
    encoder = PromptEncoder(write_model_dir(tmp_path, CHATML + "<think>\n{# </think> #}"))
    transport = httpx.ASGITransport(application(ScriptedBackend([delta("yes", "stop")]), encoder))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        chat = {"messages": CHAT["messages"]}
        answer = await client.post("/v1/chat/completions", json={**chat, "guided_choice": ["yes", "no"]})
        assert answer.json()["choices"][0]["message"]["content"] == "yes"
        thought = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["message"]
        assert thought["reasoning_content"] == "yes" and not thought["content"]
