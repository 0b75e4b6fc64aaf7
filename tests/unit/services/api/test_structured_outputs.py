"""Constraints of outputs, and tools in chats: what the backend is asked for, what clients get, what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import Tokenizer

from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import ReasoningBudget
from farsight.services.api.field_groups import MAX_TOOLS
from farsight.services.api.structured import Constraint
from farsight.services.api.text.grammars import grammar_of
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

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def form(**schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", **schema}}}


SPELLINGS: list[tuple[dict[str, Any], Constraint]] = [
    (form(strict=True, schema=SCHEMA), Constraint("", "schema", SCHEMA)),
    ({"response_format": {"type": "json_object"}}, Constraint("", "object", True)),
    ({"structured_outputs": {"json": SCHEMA}}, Constraint("", "schema", SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Constraint("", "schema", json.dumps(SCHEMA))),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, Constraint("", "schema", SCHEMA, True)),
    ({"structured_outputs": {"json_object": True, "regex": None}}, Constraint("", "object", True)),
    ({"structured_outputs": {"choice": ["a", 'b"']}}, Constraint("", "choice", ["a", 'b"'])),
    ({"guided_json": SCHEMA}, Constraint("", "schema", SCHEMA)),
    ({"guided_regex": "a+"}, Constraint("", "regex", "a+")),
    ({"guided_choice": ["a", "b"]}, Constraint("", "choice", ["a", "b"])),
    ({"guided_grammar": 'start: "a"'}, Constraint("", "grammar", 'start: "a"')),
]


@pytest.mark.parametrize(("fields", "constraint"), SPELLINGS)
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", CHAT)])
async def test_every_spelling_becomes_its_grammar(
    client: Client, backend: ScriptedBackend, path: str, body: Any, fields: Any, constraint: Constraint
) -> None:
    await ok(client, path, **body, **fields, n=2)
    assert [sampling.grammar for _, sampling in backend.calls] == [grammar_of(constraint)] * 2


FUNCTION = {"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"}


@pytest.mark.parametrize("spelling", ["response_format", "object", "text"])
async def test_structural_tags_hold_json_in_free_text(client: Client, backend: ScriptedBackend, spelling: str) -> None:
    tags = {"type": "structural_tag", "structures": [FUNCTION], "triggers": ["<function="]}
    written = {"structured_outputs": {"structural_tag": json.dumps(tags) if spelling == "text" else tags}}
    fields = {"response_format": tags} if spelling == "response_format" else written
    await ok(client, "/v1/chat/completions", **CHAT, **fields)
    vocabulary = LLTokenizer("byte")
    matcher = LLMatcher(vocabulary, backend.calls[0][1].grammar)
    for text, is_allowed in (
        ("free <function", True),
        ('It is <function=f>{"a": 1}</function> and <function=f>{"a":2}</function>.', True),
        ("<function=f>{}", False),
        ("<function=g>", False),
    ):
        ids = vocabulary.tokenize_str(text)
        assert (matcher.validate_tokens(ids) == len(ids)) is is_allowed, text


def _deep(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


DEEP = _deep(64)


def tag(schema: Any, trigger: str) -> dict[str, Any]:
    structures = [{**FUNCTION, "schema": schema}]
    return {"response_format": {"type": "structural_tag", "structures": structures, "triggers": [trigger]}}


def of_a(schema: Any) -> dict[str, Any]:
    return {"guided_json": {"type": "object", "properties": {"a": schema}}}


OBJECT = {"type": "json_object", "json_schema": {"schema": {}}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
    ({"response_format": OBJECT}, "response_format.json_schema", "null"),
    (form(), "schema", "missing"),
    (
        form(schema="abc"),
        "response_format.json_schema.schema",
        "schema: got 'abc', expected a JSON Schema: an object, ",
    ),
    (form(schema=DEEP), "response_format.json_schema.schema", "130 levels deep"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.structures", "a list"),
    (tag(SCHEMA, "<call="), "response_format", "none of the triggers"),
    (tag(DEEP, "<"), "response_format", "130 levels deep"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ""),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "structures"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "only one of"),
    ({"guided_regex": "("}, "guided_regex", "guided_regex"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "guided_choice"),
    (of_a({"type": "array", "uniqueItems": True}), "guided_json.properties.a", "/properties/a"),
    (of_a({"minimum": "1"}), "guided_json.properties.a", "a number is expected"),
    ({"guided_json": 5}, "guided_json", "got 5, expected a JSON Schema: an object, true, false, or its text"),
    ({"guided_json": {"$ref": "http://e/x"}}, "guided_json", "other documents are not fetched"),
    ({"guided_json": DEEP}, "guided_json", "130 levels deep"),
    ({"guided_json": {"description": "x" * 70_000}}, "guided_json", "characters"),
    ({"tool_choice": 5}, "tool_choice", "got 5, expected 'auto', 'none', 'required', or an object that names a tool"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
async def test_refused_with_the_field(
    client: Client, backend: ScriptedBackend, fields: dict[str, Any], param: str, words: str
) -> None:
    error = await refusal(client, "/v1/chat/completions", **CHAT, **fields)
    assert not re.search(r"Input should|dict\[|literal\[|f64|registry", str(error)), error
    assert str(error["param"]).endswith(param) and words in error["message"], error
    assert not backend.calls


async def test_an_emulated_device_follows_nothing(client: Client, backend: ScriptedBackend) -> None:
    backend.model = dataclasses.replace(backend.model, emulated="h100")
    error = await refusal(client, "/v1/chat/completions", **CHAT, guided_choice=["a"])
    assert "emulated" in error["message"]


PARAMETERS: dict[str, Any] = {
    **{"type": "object", "required": ["city"], "additionalProperties": False},
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
GET_WEATHER = {"name": "get_weather", "description": "The weather of a city.", "parameters": PARAMETERS}
WEATHER: dict[str, Any] = {"type": "function", "function": GET_WEATHER}
PATH = "/v1/chat/completions"
TOOL_CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
SCRIPT = [delta("Let me look. "), *(delta(char) for char in CALL), delta("", "stop")]


def strict(reply: Any, kind: type[ChatCompletion] | type[ChatCompletionChunk]) -> Any:
    """The library's own model of the reply, which takes nothing that the library does not."""
    return kind.model_validate(reply, strict=True)


async def test_an_answer_that_calls_a_tool(connect: Connect) -> None:
    choice = strict(await ok(connect(ScriptedBackend(SCRIPT)), PATH, **TOOL_CHAT), ChatCompletion).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather" and call.type == "function" and call.id.startswith("call_")
    assert json.loads(call.function.arguments) == {"city": "Rome", "days": 2}


async def test_a_stream_that_calls_a_tool_sends_its_arguments_as_they_come(connect: Connect) -> None:
    client = connect(ScriptedBackend(SCRIPT))
    response = await client.post(PATH, json={**TOOL_CHAT, "stream": True})
    chunks = [strict(each, ChatCompletionChunk) for each in read_events(response.text)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(each.content or "" for each in deltas) == "Let me look."
    calls = [call for each in deltas for call in each.tool_calls or ()]
    assert calls[0].function.name == "get_weather" and calls[0].id and calls[0].function.arguments == ""
    assert all(call.id is None and call.index == 0 for call in calls[1:])
    assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "Rome", "days": 2}
    assert len(calls) > 20
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_a_forced_call_that_is_cut_is_no_text(connect: Connect) -> None:
    cut = [delta(CALL), delta('\n<tool_call>\n{"na'), delta("", "length")]
    choice = (await ok(connect(ScriptedBackend(cut)), PATH, **TOOL_CHAT, tool_choice="required"))["choices"][0]
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
    body = {**TOOL_CHAT, **fields, "tool_choice": choice}
    answer = (await ok(connect(ScriptedBackend(BROKEN)), PATH, **body))["choices"][0]
    made = answer["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"])["days"] for call in made] == days
    assert answer["finish_reason"] == "length" and answer["message"]["content"] is None
    streamed = await connect(ScriptedBackend(BROKEN)).post(PATH, json={**body, "stream": True})
    texts = [""] * len(days)
    for event in read_events(streamed.text):
        for call in event["choices"][0]["delta"].get("tool_calls", ()):
            texts[call["index"]] += call["function"]["arguments"]
    assert [json.loads(text)["days"] for text in texts] == days


async def test_the_other_dialects_send_one_call_where_one_is_wanted(connect: Connect) -> None:
    client = connect(ScriptedBackend(BROKEN))
    tools: list[dict[str, Any]] = [{"name": "get_weather", "input_schema": PARAMETERS}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    fields = {"messages": TOOL_CHAT["messages"], "max_tokens": 9, "tools": tools, "tool_choice": choice}
    blocks = (await ok(client, "/v1/messages", **fields))["content"]
    assert [block["input"]["days"] for block in blocks] == [2]
    tools = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS}]
    items = (await ok(client, "/v1/responses", input="hi", tools=tools, parallel_tool_calls=False))["output"]
    assert [json.loads(item["arguments"])["days"] for item in items] == [2]


async def test_text_that_is_no_call_stays_text(connect: Connect) -> None:
    text = 'A <tool_call> that is none: <tool_call>\n{"name": 3}</tool_call> <script>alert(1)</script>'
    client = connect(ScriptedBackend([delta(char) for char in text] + [delta("", "stop")]))
    choice = (await ok(client, PATH, **TOOL_CHAT))["choices"][0]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert "<script>alert(1)</script>" in choice["message"]["content"]
    plain = await ok(connect(ScriptedBackend(SCRIPT)), PATH, messages=TOOL_CHAT["messages"])
    assert plain["choices"][0]["message"]["content"] == f"Let me look. {CALL}"


@pytest.mark.parametrize(
    ("fields", "is_constrained"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "none"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, True),
        ({"tools": [{**WEATHER, "function": {**GET_WEATHER, "strict": True}}]}, True),
        ({"response_format": {"type": "json_object"}}, True),
    ],
)
async def test_what_constrains_the_output(
    client: Client, backend: ScriptedBackend, fields: dict[str, Any], is_constrained: bool
) -> None:
    await ok(client, PATH, **{**TOOL_CHAT, **fields})
    assert bool(backend.calls[0][1].grammar) is is_constrained


async def test_a_history_of_calls_reaches_the_template(client: Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    said: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "<|im_end|> sunny"}
    for turn in (said, {**said, "content": None}):
        await ok(client, PATH, **{**TOOL_CHAT, "messages": [*TOOL_CHAT["messages"], turn, result]})


def nested(inner: dict[str, Any], levels: int) -> dict[str, Any]:
    for _ in range(levels):
        inner = {"type": "object", "properties": {"a": inner}}
    return inner


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


def required(**parts: Any) -> dict[str, Any]:
    return {**tool(parameters={"properties": {"a": parts}}), "tool_choice": "required"}


CHOSEN = {"type": "function", "function": {"name": "g"}}
REFUSED_TOOLS: list[tuple[dict[str, Any], str, str]] = [
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
    (tool(parameters=nested({"type": "object"}, 40)), "tools", "levels"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type", "'function'"),
    ({"tool_choice": CHOSEN}, "tool_choice.function.name", "get_weather"),
    ({"tool_choice": "sometimes"}, "tool_choice", ""),
    (required(type="array", uniqueItems=True), "tools[0].function.parameters", "/properties/a"),
    (required(maximum=2**60, minimum=2**60), "tools[0].function.parameters", "2^53"),
    (required(**{"$ref": "#/nowhere"}), "tools[0].function.parameters", "nowhere"),
    ({"guided_regex": "a+"}, "guided_regex", "beside tools"),
    ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos", "false"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED_TOOLS)
async def test_what_cannot_be_called_is_refused(
    client: Client, backend: ScriptedBackend, fields: dict[str, Any], param: str, words: str
) -> None:
    error = await refusal(client, PATH, **{**TOOL_CHAT, **fields})
    assert str(error["param"]).startswith(param) and words in error["message"], error
    assert not backend.calls


async def test_a_recursive_schema_is_followed(client: Client, backend: ScriptedBackend) -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    jsonschema.Draft202012Validator.check_schema(tree)
    await ok(client, PATH, **{**TOOL_CHAT, **tool(parameters=tree), "tool_choice": "required"})
    assert backend.calls[0][1].grammar


ANY: dict[str, Any] = {"a": {}}
USED = {"type": "tool_use", "id": "1", "name": "f", "input": ANY}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (PATH, tool(parameters=ANY)),
        (PATH, {"chat_template_kwargs": ANY}),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": ANY}], "max_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": [USED]}], "max_tokens": 1}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": ANY}]}),
    ],
)
@pytest.mark.parametrize("levels", [100, 400, 800, 900, 940, 960, 100_000])
async def test_what_is_nested_deeply_is_refused(client: Client, path: str, fields: dict[str, Any], levels: int) -> None:
    body = {"messages": TOOL_CHAT["messages"], **fields} if path != "/v1/responses" else fields
    text = json.dumps(body).replace('{"a": {}}', '{"a": ' * levels + "{}" + "}" * levels)
    for padded in (text, text + " " * 70_000):
        headers = {"content-type": "application/json"}
        response = await client.post(path, content=padded.encode()[:99_000], headers=headers)
        assert response.status_code == 400, response.text


def thinking(folder: Path, *script: TokenDelta, template: str = CHATML + "<think>\n{# </think> #}") -> Any:
    """A client, and the backend, of a model that is made to think."""
    backend = ScriptedBackend(script)
    return client_on(application(backend, PromptEncoder(write_model_dir(folder, template)))), backend


@pytest.mark.parametrize(("template", "in_prompt"), [(CHATML + "<think>\n{# </think> #}", True), (CHATML, False)])
async def test_the_reasoning_has_a_budget(tmp_path: Path, template: str, in_prompt: bool) -> None:
    client, backend = thinking(tmp_path, delta("yes", "stop"), template=template)
    messages = TOOL_CHAT["messages"]
    await ok(client, PATH, messages=messages, thinking_token_budget=5)
    budget = {"type": "enabled", "budget_tokens": 5}
    await ok(client, "/v1/messages", messages=messages, max_tokens=9, thinking=budget)
    await ok(client, PATH, messages=messages)
    error = await refusal(client, PATH, messages=messages, thinking_token_budget=-1)
    assert error["param"] == "thinking_token_budget"
    end = tuple(Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("</think>", add_special_tokens=False).ids)
    wanted = ReasoningBudget(5, (), end) if in_prompt else None
    assert [sampling.reasoning for _, sampling in backend.calls] == [wanted, wanted, None]


async def test_an_expression_leaves_no_room_for_reasoning(tmp_path: Path) -> None:
    client, _ = thinking(tmp_path, delta("yes", "stop"))
    chat = {"messages": TOOL_CHAT["messages"]}
    answer = (await ok(client, PATH, **chat, guided_choice=["yes", "no"]))["choices"][0]["message"]
    assert answer["content"] == "yes"
    thought = (await ok(client, PATH, **chat))["choices"][0]["message"]
    assert thought["reasoning_content"] == "yes" and not thought["content"]
