"""Every refusal: what is sent, and the status, the field and the words that come back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import httpx
import pytest

from services.api.schemas import ChatCompletionRequest, CompletionRequest
from tests.unit.services.api.api_support import MODEL, ScriptedBackend

COMPLETION = {"model": MODEL, "prompt": "hello"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
LONG = list(range(10)) * 10
DROP = object()


def _check_error(response: httpx.Response, status: int, param: str | None, *words: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param
    for word in words:
        assert word in body["error"]["message"]
    return dict(body["error"])


COMMON_CASES = [
    ({"model": 5}, 400, "model", ["got 5", "string"]),
    ({"model": "gpt"}, 404, "model", ["'gpt'", "'tiny'"]),
    ({"max_tokens": 0}, 400, "max_tokens", ["got 0", "integer >= 1"]),
    ({"max_tokens": -1}, 400, "max_tokens", ["got -1"]),
    ({"max_tokens": "5"}, 400, "max_tokens", ["got '5'", "integer"]),
    ({"max_tokens": 5.0}, 400, "max_tokens", ["got 5.0"]),
    ({"max_tokens": True}, 400, "max_tokens", ["got True"]),
    ({"max_tokens": 64}, 400, "max_tokens", ["got 64", "64 tokens"]),
    ({"max_tokens": 10**300}, 400, "max_tokens", ["expected at most"]),
    ({"temperature": -0.1}, 400, "temperature", ["got -0.1", "from 0 to 2"]),
    ({"temperature": 2.1}, 400, "temperature", ["from 0 to 2"]),
    ({"temperature": float("nan")}, 400, "temperature", ["got nan", "from 0 to 2"]),
    ({"temperature": float("inf")}, 400, "temperature", ["got inf"]),
    ({"temperature": "1"}, 400, "temperature", ["got '1'", "number"]),
    ({"top_p": 0}, 400, "top_p", ["got 0", "> 0 and <= 1"]),
    ({"top_p": 1.5}, 400, "top_p", ["got 1.5"]),
    ({"top_k": -2}, 400, "top_k", ["got -2", ">= -1"]),
    ({"seed": -2}, 400, "seed", ["got -2", "-1 for any"]),
    ({"seed": 2**64}, 400, "seed", ["0 to 2**64 - 1"]),
    ({"seed": 1.5}, 400, "seed", ["got 1.5"]),
    ({"stop": ""}, 400, "stop", ["non-empty"]),
    ({"stop": 5}, 400, "stop", ["got 5", "up to 16"]),
    ({"stop": ["a", ""]}, 400, "stop[1]", ["non-empty"]),
    ({"stop": ["a", 5]}, 400, "stop[1]", ["got 5"]),
    ({"stop": ["a"] * 17}, 400, "stop", ["up to 16"]),
    ({"stop": "x" * 257}, 400, "stop", ["got '257 characters'", "at most 256"]),
    ({"stop": ["a", "x" * 257]}, 400, "stop[1]", ["got '257 characters'", "at most 256"]),
    ({"stop_token_ids": 5}, 400, "stop_token_ids", ["list of token ids"]),
    ({"stop_token_ids": [5] * 1025}, 400, "stop_token_ids", ["list of token ids, at most 1024"]),
    ({"stop_token_ids": [1, -5]}, 400, "stop_token_ids[1]", ["got -5"]),
    ({"stop_token_ids": [1, "a"]}, 400, "stop_token_ids[1]", ["got 'a'"]),
    ({"stop_token_ids": [300]}, 400, "stop_token_ids[0]", ["from 0 to 299"]),
    ({"ignore_eos": 1}, 400, "ignore_eos", ["true or false"]),
    ({"stream": "yes"}, 400, "stream", ["got 'yes'", "true or false"]),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", ["stream"]),
    ({"stream": True, "stream_options": 5}, 400, "stream_options", ["got 5", "object"]),
    ({"stream": True, "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage", ["true or false"]),
    ({"stream": True, "stream_options": {"usage": 1}}, 400, "stream_options.usage", ["unknown", "include_usage"]),
    ({"user": 5}, 400, "user", ["got 5", "string"]),
    ({"max_token": 5}, 400, "max_token", ["unknown field", "did you mean 'max_tokens'"]),
    ({"zzzzz": 5}, 400, "zzzzz", ["unknown field", "the fields are", "top_p"]),
    ({"temperature": True}, 400, "temperature", ["got True"]),
    ({"n": 0}, 400, "n", ["got 0", "from 1 to 128"]),
    ({"n": 129}, 400, "n", ["got 129"]),
    ({"n": True}, 400, "n", ["got True"]),
    ({"min_p": 1.5}, 400, "min_p", ["got 1.5", "from 0 to 1"]),
    ({"min_p": True}, 400, "min_p", ["got True"]),
    ({"priority": 1.5}, 400, "priority", ["got 1.5", "integer from -2147483647"]),
    ({"priority": 2**31}, 400, "priority", ["got 2147483648", "to 2147483647"]),
    ({"deadline_s": 0}, 400, "deadline_s", ["got 0", "seconds > 0 and <= 86400"]),
    ({"deadline_s": -1.5}, 400, "deadline_s", ["got -1.5"]),
    ({"deadline_s": "5"}, 400, "deadline_s", ["got '5'", "a number of seconds"]),
    ({"deadline_s": True}, 400, "deadline_s", ["got True"]),
    ({"deadline_s": 86401}, 400, "deadline_s", ["got 86401"]),
    ({"deadline_s": float("inf")}, 400, "deadline_s", ["got inf"]),
    ({"slo": 5}, 400, "slo", ["got 5", "an object with ttft and tpot"]),
    ({"slo": {"ttft": 0}}, 400, "slo.ttft", ["got 0", "seconds > 0"]),
    ({"slo": {"tpot": "fast"}}, 400, "slo.tpot", ["got 'fast'", "a number of seconds"]),
    ({"slo": {"tpott": 1}}, 400, "slo.tpott", ["unknown field", "tpot"]),
    ({"service_tier": "scale"}, 400, "service_tier", ["got 'scale'", "'auto', 'default', 'priority' or 'flex'"]),
    ({"service_tier": 1}, 400, "service_tier", ["got 1"]),
    ({"service_tier": "priority", "priority": 2}, 400, "priority", ["got 2", "null where service_tier is 'priority'"]),
    ({"cache_salt": ""}, 400, "cache_salt", ["got ''", "1 to 1024 characters"]),
    ({"cache_salt": 5}, 400, "cache_salt", ["got 5"]),
    ({"min_tokens": -1}, 400, "min_tokens", ["got -1", "integer >= 0"]),
    ({"min_tokens": 6, "max_tokens": 5}, 400, "min_tokens", ["got 6", "max_tokens = 5"]),
    ({"repetition_penalty": 0}, 400, "repetition_penalty", ["got 0", "from 0.01"]),
    ({"repetition_penalty": 1e300}, 400, "repetition_penalty", ["got 1e+300"]),
    ({"presence_penalty": 2.5}, 400, "presence_penalty", ["got 2.5", "from -2 to 2"]),
    ({"presence_penalty": False}, 400, "presence_penalty", ["got False"]),
    ({"frequency_penalty": -2.5}, 400, "frequency_penalty", ["got -2.5", "from -2 to 2"]),
    ({"frequency_penalty": "1"}, 400, "frequency_penalty", ["got '1'"]),
    ({"logit_bias": []}, 400, "logit_bias", ["got []", "token ids"]),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias", ["got 'x'", "token ids"]),
    ({"logit_bias": {"-1": 1}}, 400, "logit_bias", ["got '-1'"]),
    ({"logit_bias": {"1": 1, "01": 2}}, 400, "logit_bias", ["got '01'", "each once"]),
    ({"logit_bias": {"²": 1}}, 400, "logit_bias", ["got '²'"]),
    ({"logit_bias": {"300": 1}}, 400, "logit_bias", ["got 300", "from 0 to 299"]),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias.5", ["got 101", "from -100 to 100"]),
    ({"logit_bias": {"5": True}}, 400, "logit_bias.5", ["got True"]),
    ({"logit_bias": {"5": None}}, 400, "logit_bias.5", ["got None"]),
    ({"logit_bias": {"5": float("nan")}}, 400, "logit_bias.5", ["got nan"]),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias", ["up to 1024"]),
    ({"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", ["got 0", "integer >= 1"]),
    ({"truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens", ["got -2"]),
    ({"allowed_token_ids": []}, 400, "allowed_token_ids", ["got []", "1 to 65536"]),
    ({"allowed_token_ids": [300]}, 400, "allowed_token_ids[0]", ["got 300", "from 0 to 299"]),
    ({"bad_words": [""]}, 400, "bad_words[0]", ["got ''"]),
    ({"bad_words": ["a"] * 257}, 400, "bad_words", ["up to 256"]),
    ({"prompt_logprobs": 21}, 400, "prompt_logprobs", ["got 21", "from 0 to 20"]),
    ({"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", ["null where stream is true"]),
    ({"return_token_ids": 1}, 400, "return_token_ids", ["true or false"]),
    ({"skip_special_tokens": False}, 400, "skip_special_tokens", ["return_token_ids"]),
    ({"use_beam_search": True, "stream": True}, 400, "stream", ["use_beam_search"]),
    ({"nonsense": 1}, 400, "nonsense", ["unknown field"]),
    ({"benchmark_len": 5}, 400, "benchmark_len", ["got 5", "--benchmark-mode"]),
    ({"benchmark_len": 0}, 400, "benchmark_len", ["got 0", "integer >= 1"]),
    ({"temperature": -1, "top_p": 7}, 400, "temperature", ["temperature: got -1", "top_p: got 7"]),
]

COMPLETION_CASES = [
    *COMMON_CASES,
    ({"prompt": DROP}, 400, "prompt", ["missing"]),
    ({"prompt": None}, 400, "prompt", ["got None"]),
    ({"prompt": []}, 400, "prompt", ["got []"]),
    ({"prompt": [[]]}, 400, "prompt[0]", ["non-empty"]),
    ({"prompt": ["a", 5]}, 400, "prompt[1]", ["got 5", "string"]),
    ({"prompt": [5, "a"]}, 400, "prompt[1]", ["got 'a'", "token id"]),
    ({"prompt": [5, 1.5]}, 400, "prompt[1]", ["got 1.5"]),
    ({"prompt": [True]}, 400, "prompt[0]", ["got True"]),
    ({"prompt": [[1], [True]]}, 400, "prompt[1]", ["token ids"]),
    ({"prompt": {"a": 1}}, 400, "prompt", ["string"]),
    ({"prompt": ["a"] * 257}, 400, "prompt", ["257 prompts", "at most 256"]),
    ({"prompt": [1, 300]}, 400, "prompt[1]", ["got 300", "from 0 to 299"]),
    ({"prompt": [1, -1]}, 400, "prompt[1]", ["got -1"]),
    ({"prompt": [[1], [2, 300]]}, 400, "prompt[1][1]", ["got 300"]),
    ({"prompt": LONG}, 400, "prompt", ["100 tokens", "at most 63", "context of 64"]),
    ({"prompt": [[1], LONG]}, 400, "prompt[1]", ["100 tokens"]),
    ({"prompt": [1] * 60, "max_tokens": 5}, 400, "max_tokens", ["got 5", "at most 4", "60 tokens"]),
    ({"echo": 1}, 400, "echo", ["got 1", "true or false"]),
    ({"n": 3, "best_of": 2}, 400, "best_of", ["got 2", "n = 3"]),
    ({"best_of": 129}, 400, "best_of", ["got 129", "from 1 to 128"]),
    ({"best_of": 3, "stream": True}, 400, "best_of", ["got 3", "n = 1 where stream is true"]),
    ({"n": 100, "prompt": ["a", "b", "c"]}, 400, "n", ["got 100", "at most 85 with 3 prompts"]),
    ({"best_of": 129, "prompt": ["a"] * 256}, 400, "best_of", ["got 129"]),
    ({"max_tokens": 0, "echo": False}, 400, "max_tokens", ["got 0", "0 where echo is true"]),
    ({"logprobs": 21}, 400, "logprobs", ["got 21", "from 0 to 20"]),
    ({"logprobs": True}, 400, "logprobs", ["got True", "from 0 to 20"]),
    ({"logprobs": -1}, 400, "logprobs", ["got -1"]),
    ({"top_logprobs": 1}, 400, "top_logprobs", ["unknown field", "did you mean 'logprobs'"]),
    ({"suffix": "x"}, 400, "suffix", ["not supported"]),
    ({"messages": [{}]}, 400, "messages", ["unknown field"]),
    ({"max_completion_tokens": 5}, 400, "max_completion_tokens", ["did you mean 'max_tokens'"]),
]


def _message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": "hi", **fields}]}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
NO_IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
CHAT_CASES = [
    *COMMON_CASES,
    ({"messages": DROP}, 400, "messages", ["missing"]),
    ({"messages": []}, 400, "messages", ["non-empty list"]),
    ({"messages": "hello"}, 400, "messages", ["got 'hello'"]),
    ({"messages": ["hello"]}, 400, "messages[0]", ["got 'hello'", "an object"]),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content", ["missing", "string"]),
    ({"messages": [{"content": "x"}]}, 400, "messages[0].role", ["missing", "'user'"]),
    (_message(role="wizard"), 400, "messages[1].role", ["got 'wizard'", "'assistant'"]),
    (_message(role=5), 400, "messages[1].role", ["got 5"]),
    (_message(content=5), 400, "messages[1].content", ["got 5", "string"]),
    (_message(content=None), 400, "messages[1].content", ["got None"]),
    (_message(content=[]), 400, "messages[1].content", ["got []"]),
    (_message(content=[IMAGE]), 400, "messages[1].content[0].type", ["'a picture'", "'text'"]),
    (_message(content=[NO_IMAGE]), 400, "messages[1].content[0].image_url.url", ["'data:'", "data URL"]),
    (_message(content=["x"]), 400, "messages[1].content[0]", ["got 'x'"]),
    (_message(content=[{"type": "text"}]), 400, "messages[1].content[0].text", ["a string"]),
    (_message(content=[{"type": "text", "text": "a", "x": 1}]), 400, "messages[1].content[0].x", ["only the fields"]),
    (_message(contents="x"), 400, "messages[1].contents", ["did you mean 'content'"]),
    (_message(tool_calls=[{}]), 400, "messages[1].tool_calls[0].id", ["missing"]),
    (_message(content="hello " * 60), 400, "messages", ["tokens", "at most 63"]),
    ({"max_completion_tokens": 64}, 400, "max_completion_tokens", ["got 64"]),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens", ["integer >= 1"]),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function", ["missing"]),
    ({"tool_choice": "required"}, 400, "tool_choice", ["no tools"]),
    ({"functions": [{}]}, 400, "functions", ["use tools"]),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type", ["json_schema"]),
    ({"modalities": ["audio"]}, 400, "modalities", ["only text"]),
    ({"audio": {}}, 400, "audio", ["only text"]),
    ({"top_logprobs": 2}, 400, "top_logprobs", ["got 2", "logprobs is not true"]),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", ["got 21", "from 0 to 20"]),
    ({"logprobs": True, "top_logprobs": True}, 400, "top_logprobs", ["got True"]),
    ({"logprobs": 1}, 400, "logprobs", ["got 1", "true or false for a chat"]),
    ({"max_completion_tokens": 4, "min_tokens": 5}, 400, "min_tokens", ["got 5", "max_tokens = 4"]),
    ({"echo": "yes"}, 400, "echo", ["got 'yes'", "true or false"]),
    ({"best_of": 2}, 400, "best_of", ["n draws several"]),
    ({"continue_final_message": True, "add_generation_prompt": True}, 400, "add_generation_prompt", ["got True"]),
    ({"store": True}, 400, "store", ["not stored"]),
    ({"prompt": "x"}, 400, "prompt", ["unknown field"]),
]


def _changed(base: dict[str, Any], change: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in {**base, **change}.items() if value is not DROP})


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(("change", "status", "param", "words"), COMPLETION_CASES)
async def test_completion_refusals(
    client: httpx.AsyncClient, backend: ScriptedBackend, change: Any, status: int, param: str, words: list[str]
) -> None:
    response = await client.post("/v1/completions", content=_changed(COMPLETION, change), headers=JSON)
    _check_error(response, status, param, param, *words)
    assert backend.num_opened == 0


@pytest.mark.parametrize(("change", "status", "param", "words"), CHAT_CASES)
async def test_chat_refusals(
    client: httpx.AsyncClient, backend: ScriptedBackend, change: Any, status: int, param: str, words: list[str]
) -> None:
    response = await client.post("/v1/chat/completions", content=_changed(CHAT, change), headers=JSON)
    _check_error(response, status, param, param, *words)
    assert backend.num_opened == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["empty"]),
        (b"  ", ["empty"]),
        (b'{"model": ', ["not JSON", "line 1 column"]),
        (b'{"model": "tiny",\n oops}', ["line 2 column 2 (character 19)"]),
        (b"[1]", ["a list", "expected a JSON object"]),
        (b"null", ["null"]),
        (b"5", ["a number"]),
        (b'"x"', ["a string"]),
        (b'{"model": "\xff"}', ["not UTF-8 at byte 11 (0xff)"]),
        (b'{"model": "\\ud800"}', ["surrogate"]),
        (b'{"\\ud800": 1}', ["surrogate"]),
        (b"[" * 50_000, ["nested too deeply"]),
        (b'{"seed": ' + b"1" * 5000 + b"}", ["too many digits"]),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_body_that_is_no_object(client: httpx.AsyncClient, path: str, content: bytes, words: list[str]) -> None:
    error = _check_error(await client.post(path, content=content, headers=JSON), 400, None, *words)
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_wrong_content_type(client: httpx.AsyncClient, content_type: str) -> None:
    response = await client.post("/v1/completions", content=b"{}", headers={"content-type": content_type})
    _check_error(response, 415, None, content_type, "application/json")


async def test_missing_content_type(client: httpx.AsyncClient) -> None:
    _check_error(await client.post("/v1/completions", content=b"{}"), 415, None, "got none", "application/json")


@pytest.mark.parametrize("headers", [JSON, {"content-type": "application/json; charset=utf-8"}])
async def test_accepted_content_types(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    response = await client.post("/v1/completions", content=_changed(COMPLETION, {}), headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/nothing", "/v1/images"])
async def test_unknown_address(client: httpx.AsyncClient, path: str) -> None:
    error = _check_error(await client.post(path, json={}), 404, None, "POST", path)
    assert error["code"] == "not_found"


async def test_wrong_method(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/completions")
    _check_error(response, 405, None, "POST")
    assert response.headers["allow"] == "POST"


async def test_declared_length_over_the_limit(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", content=b"x" * 100_001, headers=JSON)
    _check_error(response, 413, None, "100001 bytes", "limit is 100000 bytes")
    assert response.headers["connection"] == "close"


async def test_received_bytes_over_the_limit(client: httpx.AsyncClient) -> None:
    num_read = 0

    async def components() -> Any:
        nonlocal num_read
        for _ in range(1000):
            num_read += 1
            yield b"x" * 1000

    response = await client.post("/v1/completions", content=components(), headers=JSON)
    _check_error(response, 413, None, "more than 100000 bytes")
    assert num_read < 600


NEUTRAL_COMMON = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "logprobs": None,
    "stop": None,
    "seed": None,
    "temperature": None,
    "user": "someone",
}
NEUTRAL_CHAT = {
    **NEUTRAL_COMMON,
    "tools": [],
    "tool_choice": "none",
    "functions": None,
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "logprobs": False,
    "top_logprobs": 0,
    "store": False,
    "audio": None,
}


async def test_text_with_tokens_that_the_model_lacks(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    """A tokenizer may know more tokens than its model."""
    backend.model = dataclasses.replace(backend.model, vocab_size=20)
    for path, body, field in (("completions", COMPLETION, "prompt"), ("chat/completions", CHAT, "messages")):
        response = await client.post(f"/v1/{path}", json=body)
        _check_error(response, 400, field, "got 'text with token", "vocabulary of 20")
    assert backend.calls == []


async def test_the_schema_says_what_is_bounded(client: httpx.AsyncClient) -> None:
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        fields = schemas[name]["properties"]
        one, several, _ = fields["stop"]["anyOf"]
        assert (one["maxLength"], several["maxItems"], several["items"]["maxLength"]) == (256, 16, 256)
        assert fields["stop_token_ids"]["anyOf"][0]["maxItems"] == 1024
        assert fields["logit_bias"]["anyOf"][0]["maxProperties"] == 1024


async def test_neutral_values_are_accepted(client: httpx.AsyncClient) -> None:
    body = {**COMPLETION, **NEUTRAL_COMMON, "echo": False, "best_of": 1, "suffix": None}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert (await client.post("/v1/chat/completions", json={**CHAT, **NEUTRAL_CHAT})).status_code == 200


async def test_every_optional_field_takes_null(client: httpx.AsyncClient) -> None:
    names = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields} - {"model", "prompt", "messages"}
    completion_only = {"best_of", "instruction", "parse_special", "add_special_tokens"}
    chat_only = {"top_logprobs", "max_completion_tokens", "add_generation_prompt", "continue_final_message"}
    nulls = dict.fromkeys(names - completion_only - chat_only)
    body = {**COMPLETION, **nulls, **dict.fromkeys(completion_only)}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    body = {**CHAT, **nulls, **dict.fromkeys(chat_only)}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
