"""Tools, responses, messages and Ollama's API over HTTP, on the embedded model."""

# Fields of Ollama's client may all be None by their types: what comes is asserted instead.
# mypy: disable-error-code="union-attr,operator,arg-type,misc"
from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionFunctionToolParam
from openai.types.responses import FunctionToolParam

from tests.e2e.server import LONG_S

SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: ChatCompletionFunctionToolParam = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
UPPER = "Write in upper case:"


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=LONG_S) as client:
        yield client


def check(arguments: str) -> None:
    found = json.loads(arguments)
    assert found.keys() == {"city", "days"} and len(found["city"]) <= 12 and 1 <= found["days"] <= 9


@pytest.mark.parametrize("seed", [1, 2])
def test_a_forced_call_is_streamed_as_it_is_answered(client: openai.OpenAI, model_name: str, seed: int) -> None:
    def ask(stream: bool) -> openai.Stream[openai.types.chat.ChatCompletionChunk] | openai.types.chat.ChatCompletion:
        return client.chat.completions.create(
            model=model_name,
            messages=[{"role": "user", "content": "Rome"}],
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            seed=seed,
            stream=stream,
        )

    whole = ask(False)
    assert isinstance(whole, openai.types.chat.ChatCompletion)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None and choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    check(call.function.arguments)
    chunks = ask(True)
    assert not isinstance(chunks, openai.types.chat.ChatCompletion)
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    assert "".join((delta.function and delta.function.arguments) or "" for delta in deltas) == call.function.arguments


def test_the_example_runs(base_url: str, model_name: str) -> None:
    example = Path(__file__).parents[2] / "examples" / "openai_tools.py"
    command = [sys.executable, str(example), f"{base_url}/v1", model_name, "The weather in Rome?"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=True)
    assert found.stdout == 'get_weather({"city": "Rome"})\nsunny in rome\n'


ONE_CITY: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "find_city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.mark.parametrize("strict", [False, True])
def test_the_model_calls_a_function_by_itself(client: openai.OpenAI, model_name: str, strict: bool) -> None:
    """Nothing forces the call: the text of the model is one, with and without the grammar of a strict function."""
    tool = ONE_CITY | {"function": {**ONE_CITY["function"], "strict": strict}}
    answer = client.chat.completions.create(
        model=model_name,
        messages=[{"role": "user", "content": "the weather in oslo"}],
        tools=[tool],
        temperature=0,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "find_city"
    assert json.loads(call.function.arguments) == {"city": "oslo"}


def test_json_of_a_schema_holds_the_right_text(client: openai.OpenAI, model_name: str) -> None:
    """The grammar leaves the model its own answer."""
    schema: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    answer = client.chat.completions.create(
        model=model_name,
        messages=[
            {"role": "system", "content": "Fill in the field:"},
            {"role": "user", "content": "city\nthe weather in oslo"},
        ],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
        temperature=0,
    )
    assert answer.choices[0].message.content == '{"city": "oslo"}'


def test_a_response_and_its_stream(client: openai.OpenAI, model_name: str) -> None:
    response = client.responses.create(model=model_name, instructions=UPPER, input="hello world", temperature=0)
    assert response.output_text == "HELLO WORLD"
    with client.responses.stream(model=model_name, instructions=UPPER, input="hello", temperature=0) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == "HELLO"
    tool: FunctionToolParam = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    forced = client.responses.create(
        model=model_name,
        input="Rome",
        tools=[tool],
        tool_choice={"type": "function", "name": "get_weather"},
    )
    (item,) = forced.output
    assert item.type == "function_call"
    check(item.arguments)


def test_messages(base_url: str, model_name: str) -> None:
    body = {
        "model": model_name,
        "max_tokens": 300,
        "system": UPPER,
        "messages": [{"role": "user", "content": "hello world"}],
        "temperature": 0,
    }
    with httpx.Client(base_url=base_url, timeout=LONG_S, headers={"x-api-key": "none"}) as http:
        answer = http.post("/v1/messages", json=body).json()
        assert answer["content"] == [{"type": "text", "text": "HELLO WORLD"}] and answer["stop_reason"] == "end_turn"
        tool = {"name": "get_weather", "input_schema": SCHEMA}
        forced = {**body, "tools": [tool], "tool_choice": {"type": "tool", "name": "get_weather"}}
        (block,) = http.post("/v1/messages", json=forced).json()["content"]
        check(json.dumps(block["input"]))
        counted = http.post("/v1/messages/count_tokens", json={"messages": body["messages"], "system": UPPER}).json()
        assert counted["input_tokens"] == answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]


def test_what_open_webui_asks(base_url: str, model_name: str) -> None:
    """The calls of its connection to Ollama: its list of models, a chat, a title, embeddings, loaded models, unload."""
    with httpx.Client(base_url=base_url, timeout=LONG_S) as web:
        assert web.get("/api/version").json()["version"]
        [row] = web.get("/api/tags").json()["models"]
        assert {"name", "model", "modified_at", "size", "digest", "details"} <= row.keys()
        assert web.post("/api/show", json={"name": row["name"]}).json()["model_info"]
        chat = {
            "model": row["name"],
            "messages": [{"role": "user", "content": "hello"}],
            "options": {"num_ctx": 2048, "temperature": 0.0, "stop": ["<end>"]},
            "keep_alive": "5m",
            "stream": True,
        }
        with web.stream("POST", "/api/chat", json=chat) as answer:
            assert answer.headers["content-type"] == "application/x-ndjson"
            lines = [json.loads(line) for line in answer.iter_lines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True] and lines[0]["message"][
            "content"
        ]
        title = web.post("/api/chat", json={**chat, "stream": False, "format": "json", "options": {"num_predict": 40}})
        assert title.json()["done"] is True
        texts = web.post("/api/embed", json={"model": row["name"], "input": ["a", "b"], "truncate": True})
        assert len(texts.json()["embeddings"]) == 2
        assert web.get("/api/ps").json()["models"][0]["model"] == row["name"]
        unload = web.post("/api/generate", json={"model": row["name"], "keep_alive": 0})
        assert unload.status_code == 400 and "stays loaded" in unload.json()["error"]
