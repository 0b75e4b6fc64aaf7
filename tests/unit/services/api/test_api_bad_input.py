"""Every refusal: status, field and words; and what is accepted beside OpenAI's fields, and what it does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from farsight.services.api.schemas import ChatCompletionRequest, CompletionRequest
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import MODEL, ScriptedBackend, application, client_on, ok, read_events, refusal
from tests.unit.services.api.engine_backend import EngineBackend

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
    assert all(word in body["error"]["message"] for word in words), body
    return dict(body["error"])


Case = tuple[dict[str, Any], int, str, Sequence[str]]


def of(field: str, *cases: Any) -> list[Case]:
    """Values of a field that are refused, each with words of the message."""
    return [({field: value}, 400, field, words) for value, *words in cases]


COMMON_CASES: list[Case] = [
    *of("model", (5, "got 5", "string")),
    ({"model": "gpt"}, 404, "model", ["'gpt'", "'tiny'"]),
    *of("max_tokens", (0, "got 0", "integer >= 1"), ("5", "got '5'", "integer"), (5.0, "got 5.0"), (True, "got True")),
    *of("max_tokens", (64, "got 64", "64 tokens"), (10**300, "expected at most")),
    *of("temperature", (-0.1, "got -0.1", "from 0 to 2"), (2.1, "from 0 to 2")),
    *of("temperature", (float("nan"), "got nan", "from 0 to 2"), ("1", "got '1'", "number"), (True, "got True")),
    *of("top_p", (0, "got 0", "> 0 and <= 1"), (1.5, "got 1.5")),
    *of("top_k", (-2, "got -2", ">= -1")),
    *of("seed", (-2, "got -2", "-1 for any"), (2**64, "0 to 2**64 - 1"), (1.5, "got 1.5")),
    *of("stop", ("", "non-empty"), (5, "got 5", "up to 16"), (["a"] * 17, "up to 16")),
    *of("stop", ("x" * 257, "got '257 characters'", "at most 256")),
    ({"stop": ["a", ""]}, 400, "stop[1]", ["non-empty"]),
    ({"stop": ["a", "x" * 257]}, 400, "stop[1]", ["got '257 characters'", "at most 256"]),
    *of("stop_token_ids", (5, "list of token ids"), ([5] * 1025, "list of token ids, at most 1024")),
    ({"stop_token_ids": [1, -5]}, 400, "stop_token_ids[1]", ["got -5"]),
    ({"stop_token_ids": [1, "a"]}, 400, "stop_token_ids[1]", ["got 'a'"]),
    ({"stop_token_ids": [300]}, 400, "stop_token_ids[0]", ["from 0 to 299"]),
    *of("ignore_eos", (1, "true or false")),
    *of("stream", ("yes", "got 'yes'", "true or false")),
    *of("stream_options", ({"include_usage": True}, "stream")),
    ({"stream": True, "stream_options": 5}, 400, "stream_options", ["got 5", "object"]),
    ({"stream": True, "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage", ["true or false"]),
    ({"stream": True, "stream_options": {"usage": 1}}, 400, "stream_options.usage", ["unknown", "include_usage"]),
    *of("user", (5, "got 5", "string")),
    *of("max_token", (5, "unknown field", "did you mean 'max_tokens'")),
    *of("zzzzz", (5, "unknown field", "the fields are", "top_p")),
    *of("n", (0, "got 0", "from 1 to 128"), (129, "got 129"), (True, "got True")),
    *of("min_p", (1.5, "got 1.5", "from 0 to 1"), (True, "got True")),
    *of("priority", (1.5, "got 1.5", "integer from -2147483647"), (2**31, "got 2147483648", "to 2147483647")),
    *of("deadline_s", (0, "got 0", "seconds > 0 and <= 86400"), (-1.5, "got -1.5")),
    *of("deadline_s", ("5", "got '5'", "a number of seconds"), (True, "got True"), (86401, "got 86401")),
    *of("deadline_s", (float("inf"), "got inf")),
    *of("slo", (5, "got 5", "an object with ttft and tpot")),
    ({"slo": {"ttft": 0}}, 400, "slo.ttft", ["got 0", "seconds > 0"]),
    ({"slo": {"tpot": "fast"}}, 400, "slo.tpot", ["got 'fast'", "a number of seconds"]),
    ({"slo": {"tpott": 1}}, 400, "slo.tpott", ["unknown field", "tpot"]),
    *of("service_tier", ("scale", "got 'scale'", "'auto', 'default', 'priority' or 'flex'"), (1, "got 1")),
    ({"service_tier": "priority", "priority": 2}, 400, "priority", ["got 2", "null where service_tier is 'priority'"]),
    *of("cache_salt", ("", "got ''", "1 to 1024 characters"), (5, "got 5")),
    *of("min_tokens", (-1, "got -1", "integer >= 0")),
    ({"min_tokens": 6, "max_tokens": 5}, 400, "min_tokens", ["got 6", "max_tokens = 5"]),
    *of("repetition_penalty", (0, "got 0", "from 0.01"), (1e300, "got 1e+300")),
    *of("presence_penalty", (2.5, "got 2.5", "from -2 to 2")),
    *of("frequency_penalty", (-2.5, "got -2.5", "from -2 to 2")),
    *of("logit_bias", ([], "got []", "token ids"), ({"x": 1}, "got 'x'", "token ids"), ({"-1": 1}, "got '-1'")),
    *of("logit_bias", ({"1": 1, "01": 2}, "got '01'", "each once"), ({"²": 1}, "got '²'")),
    *of("logit_bias", ({"300": 1}, "got 300", "from 0 to 299"), ({str(i): 1 for i in range(1025)}, "up to 1024")),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias.5", ["got 101", "from -100 to 100"]),
    ({"logit_bias": {"5": True}}, 400, "logit_bias.5", ["got True"]),
    ({"logit_bias": {"5": float("nan")}}, 400, "logit_bias.5", ["got nan"]),
    *of("truncate_prompt_tokens", (0, "got 0", "integer >= 1"), (-2, "got -2")),
    *of("allowed_token_ids", ([], "got []", "1 to 65536")),
    ({"allowed_token_ids": [300]}, 400, "allowed_token_ids[0]", ["got 300", "from 0 to 299"]),
    ({"bad_words": [""]}, 400, "bad_words[0]", ["got ''"]),
    *of("bad_words", (["a"] * 257, "up to 256")),
    *of("prompt_logprobs", (21, "got 21", "from 0 to 20")),
    ({"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", ["null where stream is true"]),
    *of("return_token_ids", (1, "true or false")),
    *of("skip_special_tokens", (False, "return_token_ids")),
    ({"use_beam_search": True, "stream": True}, 400, "stream", ["use_beam_search"]),
    *of("nonsense", (1, "unknown field")),
    *of("benchmark_len", (5, "got 5", "--benchmark-mode"), (0, "got 0", "integer >= 1")),
    ({"temperature": -1, "top_p": 7}, 400, "temperature", ["temperature: got -1", "top_p: got 7"]),
]

COMPLETION_CASES: list[Case] = [
    *of("prompt", (DROP, "missing"), (None, "got None"), ([], "got []"), ({"a": 1}, "string")),
    *of("prompt", (["a"] * 257, "257 prompts", "at most 256"), (LONG, "100 tokens", "at most 63", "context of 64")),
    ({"prompt": [[]]}, 400, "prompt[0]", ["non-empty"]),
    ({"prompt": ["a", 5]}, 400, "prompt[1]", ["got 5", "string"]),
    ({"prompt": [5, "a"]}, 400, "prompt[1]", ["got 'a'", "token id"]),
    ({"prompt": [5, 1.5]}, 400, "prompt[1]", ["got 1.5"]),
    ({"prompt": [True]}, 400, "prompt[0]", ["got True"]),
    ({"prompt": [[1], [True]]}, 400, "prompt[1]", ["token ids"]),
    ({"prompt": [1, 300]}, 400, "prompt[1]", ["got 300", "from 0 to 299"]),
    ({"prompt": [1, -1]}, 400, "prompt[1]", ["got -1"]),
    ({"prompt": [[1], [2, 300]]}, 400, "prompt[1][1]", ["got 300"]),
    ({"prompt": [1] * 60, "max_tokens": 5}, 400, "max_tokens", ["got 5", "at most 4", "60 tokens"]),
    *of("echo", (1, "got 1", "true or false")),
    ({"n": 3, "best_of": 2}, 400, "best_of", ["got 2", "n = 3"]),
    *of("best_of", (129, "got 129", "from 1 to 128")),
    ({"best_of": 3, "stream": True}, 400, "best_of", ["got 3", "n = 1 where stream is true"]),
    ({"n": 100, "prompt": ["a", "b", "c"]}, 400, "n", ["got 100", "at most 85 with 3 prompts"]),
    ({"max_tokens": 0, "echo": False}, 400, "max_tokens", ["got 0", "0 where echo is true"]),
    *of("logprobs", (21, "got 21", "from 0 to 20"), (True, "got True", "from 0 to 20"), (-1, "got -1")),
    *of("top_logprobs", (1, "unknown field", "did you mean 'logprobs'")),
    *of("suffix", ("x", "not supported")),
    *of("messages", ([{}], "unknown field")),
    *of("max_completion_tokens", (5, "did you mean 'max_tokens'")),
]


def _message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": "hi", **fields}]}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
NO_IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
CHAT_CASES: list[Case] = [
    *of("messages", (DROP, "missing"), ([], "non-empty list"), ("hello", "got 'hello'")),
    ({"messages": ["hello"]}, 400, "messages[0]", ["got 'hello'", "an object"]),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content", ["missing", "string"]),
    ({"messages": [{"content": "x"}]}, 400, "messages[0].role", ["missing", "'user'"]),
    (_message(role="wiz<ard"), 400, "messages[1].role", ["got 'wiz<ard'", "'assistant'"]),
    (_message(tool_callz="x"), 400, "messages[1].tool_callz", ["did you mean 'tool_calls'"]),
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
    *of("max_completion_tokens", (64, "got 64"), (0, "integer >= 1")),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function", ["missing"]),
    *of("tool_choice", ("required", "no tools")),
    *of("functions", ([{}], "use tools")),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type", ["json_schema"]),
    *of("modalities", (["audio"], "only text")),
    *of("audio", ({}, "only text")),
    *of("top_logprobs", (2, "got 2", "logprobs is not true")),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", ["got 21", "from 0 to 20"]),
    ({"logprobs": True, "top_logprobs": True}, 400, "top_logprobs", ["got True"]),
    *of("logprobs", (1, "got 1", "true or false for a chat")),
    ({"max_completion_tokens": 4, "min_tokens": 5}, 400, "min_tokens", ["got 5", "max_tokens = 4"]),
    *of("echo", ("yes", "got 'yes'", "true or false")),
    *of("best_of", (2, "n draws several")),
    ({"continue_final_message": True, "add_generation_prompt": True}, 400, "add_generation_prompt", ["got True"]),
    *of("store", (True, "not stored")),
    *of("prompt", ("x", "unknown field")),
]


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("base", "change", "status", "param", "words"),
    [(COMPLETION, *case) for case in COMMON_CASES + COMPLETION_CASES]
    + [(CHAT, *case) for case in COMMON_CASES + CHAT_CASES],
)
async def test_what_is_wrong_is_refused_with_its_field(
    client: httpx.AsyncClient, backend: ScriptedBackend, base: Any, change: Any, status: int, param: str, words: Any
) -> None:
    content = json.dumps({name: value for name, value in {**base, **change}.items() if value is not DROP})
    path = "/v1/completions" if base is COMPLETION else "/v1/chat/completions"
    response = await client.post(path, content=content, headers=JSON)
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


@pytest.mark.parametrize(
    ("content_type", "status"),
    [("text/plain", 415), ("multipart/form-data", 415), ("", 415), ("application/json; charset=utf-8", 200)],
)
async def test_bodies_are_json(client: httpx.AsyncClient, content_type: str, status: int) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = await client.post("/v1/completions", content=json.dumps(COMPLETION), headers=headers)
    assert response.status_code == status
    if status == 415:
        _check_error(response, 415, None, content_type or "got none", "application/json")


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/nothing", "/v1/images"])
async def test_unknown_address(client: httpx.AsyncClient, path: str) -> None:
    assert _check_error(await client.post(path, json={}), 404, None, "POST", path)["code"] == "not_found"


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


async def test_every_optional_field_takes_null(client: httpx.AsyncClient) -> None:
    names = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields} - {"model", "prompt", "messages"}
    completion_only = {"best_of", "instruction", "parse_special", "add_special_tokens"}
    chat_only = {"top_logprobs", "max_completion_tokens", "add_generation_prompt", "continue_final_message"}
    nulls = dict.fromkeys(names - completion_only - chat_only)
    body = {**COMPLETION, **nulls, **dict.fromkeys(completion_only)}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    body = {**CHAT, **nulls, **dict.fromkeys(chat_only)}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


PATHS = ["/v1/completions", "/v1/chat/completions"]
SAY_HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 1}
THE_CAT: dict[str, Any] = {"prompt": "the cat", "max_tokens": 6, "seed": 1}


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    return {**(SAY_HI if "chat" in path else THE_CAT), **fields}


@pytest.fixture
def served(checkpoint: Path) -> httpx.AsyncClient:
    """A client of a real engine."""
    return client_on(application(EngineBackend(checkpoint), PromptEncoder(checkpoint)))


HARMLESS: dict[str, Any] = {
    **{"metadata": {"a": "b"}, "safety_identifier": "x", "verbosity": "low", "service_tier": "auto", "user": "someone"},
    **{"store": False, "seed": -1, "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}},
    **{"skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False},
    **{"use_beam_search": False, "length_penalty": 1.0, "kv_transfer_params": None, "stream_options": None},
    **{"anything": None, "at_all": False, "that_is": [], "empty": {}, "or_so": ""},
}
OF_ONE: dict[str, dict[str, Any]] = {
    PATHS[0]: {"echo": False, "best_of": 1, "suffix": None},
    PATHS[1]: {"tools": [], "tool_choice": "none", "functions": None, "parallel_tool_calls": True, "audio": None}
    | {"response_format": {"type": "text"}, "modalities": ["text"], "logprobs": False, "top_logprobs": 0},
}


@pytest.mark.parametrize("path", PATHS)
async def test_what_changes_nothing_is_accepted(client: httpx.AsyncClient, backend: ScriptedBackend, path: str) -> None:
    plain = await client.post(path, json=body_for(path))
    same = await client.post(path, json=body_for(path, **HARMLESS, **OF_ONE[path]))
    assert plain.status_code == same.status_code == 200, same.text
    assert same.json()["model"] == MODEL, "a request without a model gets the one that is served"
    assert plain.json().keys() == same.json().keys()
    assert backend.calls[0][0] == backend.calls[1][0]


async def test_the_newer_limit_goes_first(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    await client.post(PATHS[1], json=body_for(PATHS[1], max_tokens=9, max_completion_tokens=4))
    assert backend.calls[0][1].max_new_tokens == 4


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, [8, 9]),
        ({"truncate_prompt_tokens": 5}, [7, 8, 9]),
        ({"truncate_prompt_tokens": -1}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [7, 8]),
    ],
)
async def test_prompts_are_truncated(
    client: httpx.AsyncClient, backend: ScriptedBackend, fields: Any, kept: Any
) -> None:
    await ok(client, PATHS[0], prompt=[7, 8, 9], **fields)
    assert list(backend.calls[0][0]) == kept


async def test_a_prompt_beyond_the_context_is_cut_to_it(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    long = "hello " * 100
    prompts: list[dict[str, Any]] = [{"prompt": long}, {"messages": [{"role": "user", "content": long}]}]
    for path, prompt in zip(PATHS, prompts, strict=True):
        await ok(client, path, **prompt, truncate_prompt_tokens=-1, max_tokens=10)
    assert [len(ids) for ids, _ in backend.calls] == [54, 54]


async def test_where_a_chat_ends(client: httpx.AsyncClient, backend: ScriptedBackend, encoder: PromptEncoder) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "it is"}]
    for fields in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        await ok(client, PATHS[1], messages=messages, **fields)
    new_turn, after, inside = (encoder.echo(ids).text for ids, _ in backend.calls)
    assert new_turn.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert after.endswith("it is<|im_end|>\n")
    assert inside.endswith("it is")
    assert new_turn.startswith(after) and after.startswith(inside)


async def test_what_cannot_be_done_is_refused(client: httpx.AsyncClient) -> None:
    cut: dict[str, Any] = {"truncate_prompt_tokens": 2, "truncation_side": "middle"}
    assert (await refusal(client, PATHS[0], prompt=[7, 8], **cut))["param"] == "truncation_side"
    empty: dict[str, Any] = {"messages": [{"role": "assistant", "content": ""}], "continue_final_message": True}
    assert (await refusal(client, PATHS[1], **empty))["param"] == "continue_final_message"


@pytest.mark.parametrize("path", PATHS)
async def test_only_allowed_tokens_come(served: httpx.AsyncClient, path: str) -> None:
    fields = {"allowed_token_ids": [40, 41], "return_token_ids": True, "ignore_eos": True}
    reply = await ok(served, path, **body_for(path, **fields))
    assert set(reply["choices"][0]["token_ids"]) <= {40, 41}
    prompt_ids = reply["prompt_token_ids"] if "chat" in path else reply["choices"][0]["prompt_token_ids"]
    assert len(prompt_ids) == reply["usage"]["prompt_tokens"]


async def test_bad_words_do_not_come(served: httpx.AsyncClient) -> None:
    fields = {"temperature": 0, "ignore_eos": True, "max_tokens": 8, "logit_bias": {"40": 50, "41": 49}}
    first = (await served.post(PATHS[0], json=body_for(PATHS[0], **fields))).json()["choices"][0]["text"]
    for word in (first[0], first[:2]):
        reply = await served.post(PATHS[0], json=body_for(PATHS[0], **fields, bad_words=[word]))
        text = reply.json()["choices"][0]["text"]
        assert word in first and text and word not in text


@pytest.mark.parametrize("path", PATHS)
async def test_log_probabilities_of_prompts(served: httpx.AsyncClient, path: str) -> None:
    reply = (await served.post(path, json=body_for(path, prompt_logprobs=2, return_token_ids=True))).json()
    holder = reply if "chat" in path else reply["choices"][0]
    found, ids = holder["prompt_logprobs"], holder["prompt_token_ids"]
    assert found[0] is None and len(found) == len(ids)
    for token_id, entry in zip(ids[1:], found[1:], strict=True):
        assert str(token_id) in entry and 2 <= len(entry) <= 3
        ranks = [each["rank"] for each in entry.values() if each["rank"] is not None]
        assert sorted(ranks) == [1, 2]
    assert reply["choices"][0]["logprobs"] is None


async def test_fewer_log_probabilities_of_the_output_than_of_the_prompt(served: httpx.AsyncClient) -> None:
    fields = {"prompt_logprobs": 3, "logprobs": 1, "temperature": 0, "return_tokens_as_token_ids": True}
    logprobs = (await served.post(PATHS[0], json=body_for(PATHS[0], **fields))).json()["choices"][0]["logprobs"]
    assert all(len(top) == 1 for top in logprobs["top_logprobs"])
    assert all(token.startswith("token_id:") for token in logprobs["tokens"])


@pytest.mark.parametrize("path", PATHS)
async def test_every_chunk_says_the_usage(served: httpx.AsyncClient, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    fields = {"stream": True, "stream_options": options, "return_token_ids": True, "ignore_eos": True}
    reply = await served.post(path, json=body_for(path, **fields))
    events = [each for each in read_events(reply.text) if each != "[DONE]"]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 6 == counts[-2]
    ids = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", [])]
    assert len(ids) == 6
    named = events if path == PATHS[1] else [choice for event in events for choice in event["choices"]]
    assert ["prompt_token_ids" in each for each in named[:2]] == [True, False]
    whole = (await served.post(path, json=body_for(path, return_token_ids=True, ignore_eos=True))).json()
    assert whole["choices"][0]["token_ids"] == ids


async def test_a_cache_hint_in_a_message_changes_nothing(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    for content in ("hi", [part]):
        await ok(client, PATHS[1], messages=[{"role": "user", "content": content}])
    assert backend.calls[0][0] == backend.calls[1][0]
