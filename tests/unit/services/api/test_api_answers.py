"""Good requests, whole and streamed, and failures of the backend."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from farsight.core.errors import CapacityError, InvalidValueError
from farsight.core.request import FLEX, NO_SLO, Fault, SamplingParams, Slo
from farsight.services.api.app import build_app
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import (
    CHATML,
    MAX_MODEL_LEN,
    MODEL,
    VOCAB_SIZE,
    Client,
    ScriptedBackend,
    Step,
    application,
    chat_ids,
    client_on,
    delta,
    ok,
    read_events,
    write_model_dir,
)

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hello"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
USAGE = {"include_usage": True}


def used(prompt: int, output: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return {**counts, "prompt_tokens_details": {"cached_tokens": 0}, "gpu_seconds": 0.0}


async def _post(client: Client, base: dict[str, Any], key: str = "", **change: Any) -> httpx.Response:
    path = "/v1/chat/completions" if "messages" in base else "/v1/completions"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return await client.post(path, json={**base, **change}, headers=headers)


async def test_completion(client: Client, backend: ScriptedBackend, encoder: PromptEncoder) -> None:
    body = (await _post(client, COMPLETION)).json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    (choice,) = body.pop("choices")
    nothing = dict.fromkeys(("logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs"))
    assert choice == {"index": 0, "text": "Hello!", "finish_reason": "stop", **nothing}
    usage = used(len(encoder.encode_prompt("hello").ids), 4)
    assert body == {"object": "text_completion", "model": MODEL, "usage": usage, "service_tier": None}
    assert backend.num_closed == backend.num_completed == 1


async def test_chat(client: Client, encoder: PromptEncoder, backend: ScriptedBackend) -> None:
    body = (await _post(client, CHAT)).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello!", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert backend.calls[0][0] == chat_ids(encoder, CHAT["messages"])


async def test_sampling_defaults(client: Client, backend: ScriptedBackend) -> None:
    for base in (COMPLETION, COMPLETION, CHAT, {**COMPLETION, "prompt": [1] * 60}):
        assert (await _post(client, base)).status_code == 200
    sampling = [call[1] for call in backend.calls]
    assert [(each.temperature, each.top_p, each.top_k, each.stop) for each in sampling] == [(1.0, 1.0, 0, ())] * 4
    most = [each.max_new_tokens for each in sampling]
    assert most == [16, 16, 64 - len(backend.calls[2][0]), 4], "no more than there is room for"
    assert len({each.seed for each in sampling}) == 4


async def test_sampling_fields_reach_the_backend(client: Client, backend: ScriptedBackend) -> None:
    same: dict[str, Any] = {"temperature": 0, "top_p": 0.5, "top_k": 7, "seed": 2**64 - 1, "ignore_eos": True}
    same |= {"min_p": 0.25, "repetition_penalty": 1.25, "presence_penalty": -2, "frequency_penalty": 0.5}
    same |= {"min_tokens": 3, "benchmark_len": 4}
    lists: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": [3, 299], "logit_bias": {"7": -100, "008": 2.5}}
    tuples: dict[str, Any] = {"stop": ("a", "b"), "stop_token_ids": (3, 299), "logit_bias": ((7, -100.0), (8, 2.5))}
    backend.model = dataclasses.replace(backend.model, benchmark_mode=True)
    for base in (COMPLETION, CHAT):
        assert (await _post(client, base, **same, **lists, max_tokens=5)).status_code == 200
        assert backend.calls[-1][1] == SamplingParams(**same, **tuples, max_new_tokens=5)
    changes: list[dict[str, Any]] = [{"top_k": -1}, {"top_k": 10**30}, {"stop": "x"}]
    for change in changes:
        await _post(client, COMPLETION, **change)
    assert [(each.top_k, each.stop) for _, each in backend.calls[2:]] == [(0, ()), (VOCAB_SIZE, ()), (0, ("x",))]


async def test_targets_of_a_request_reach_the_backend(client: Client, backend: ScriptedBackend) -> None:
    targets: list[dict[str, Any]] = [
        {"priority": -3, "n": 2, "deadline_s": 3, "slo": {"ttft": 0.5}, "cache_salt": "tenant"},
        {"priority": None, "slo": {"tpot": 0.1, "ttft": None}, "cache_salt": None},
        {"priority": 7, "slo": None},
        {},
    ]
    for base in (COMPLETION, CHAT):
        for given in targets:
            assert (await _post(client, base, "key", **given)).status_code == 200
    assert backend.priorities == [-3, -3, 0, 7, 0] * 2
    assert backend.targets == [*[(3.0, Slo(ttft_s=0.5))] * 2, (None, Slo(tpot_s=0.1)), *[(None, NO_SLO)] * 2] * 2
    assert backend.salts == ["tenant", "tenant", "", "", ""] * 2


@pytest.mark.parametrize("base", [COMPLETION, CHAT])
async def test_a_session_is_named_by_a_header_or_in_the_body(
    client: Client, backend: ScriptedBackend, base: dict[str, Any]
) -> None:
    path = "/v1/chat/completions" if "messages" in base else "/v1/completions"
    named: list[tuple[dict[str, str], dict[str, Any], str]] = [
        ({"x-session-id": "a"}, {"prompt_cache_key": "b"}, "a"),
        ({}, {"prompt_cache_key": "b"}, "b"),
        ({}, {"prompt_cache_key": "b", "nvext": {"agent_hints": {"session_id": "c"}}}, "c"),
        ({}, {"nvext": {"session_id": "d", "agent_hints": {"osl": 5}}}, "d"),
        ({}, {"nvext": None}, ""),
    ]
    for headers, fields, session in named:
        reply = await client.post(path, json={**base, **fields}, headers={"user-agent": "Tool/1.2", **headers})
        assert reply.status_code == 200, reply.text
        assert backend.sessions_named[-1] == (session, "", "Tool")
    await client.post(path, json=base, headers={"x-farsight-application": "x" * 500})
    assert backend.sessions_named[-1][2] == "x" * 128
    for headers, fields, field in [
        ({"x-session-id": "x" * 1025}, {}, "x-session-id"),
        ({}, {"nvext": {"session_id": "a\x00b"}}, "nvext.session_id"),
        ({}, {"nvext": {"session_id": 7}}, "nvext.session_id"),
        ({}, {"nvext": "a"}, "nvext"),
    ]:
        refused = await client.post(path, json={**base, **fields}, headers=headers)
        assert refused.status_code == 400 and field in refused.json()["error"]["message"]


async def test_tiers_are_priorities_and_the_answer_names_them(client: Client, backend: ScriptedBackend) -> None:
    tiers = {"auto": "default", "default": "default", "priority": "priority", "flex": "flex", None: None}
    for base in (COMPLETION, CHAT):
        for asked, served in tiers.items():
            reply = await _post(client, base, service_tier=asked)
            assert reply.json()["service_tier"] == served
        chunks = read_events((await _post(client, base, service_tier="flex", priority=3, stream=True)).text)
        assert {chunk["service_tier"] for chunk in chunks} == {"flex"}
    assert backend.priorities == [0, 0, -1, FLEX, 0, FLEX + 3] * 2


async def test_keys_may_share_nothing(encoder: PromptEncoder, backend: ScriptedBackend) -> None:
    async with client_on(application(backend, encoder, shares_across_keys=False)) as client:
        for key, salt in (("one", "x"), ("one", "x"), ("one", None), ("two", "x"), ("", "x"), ("", None)):
            assert (await _post(client, CHAT, key, cache_salt=salt)).status_code == 200
        assert (await _post(client, CHAT, cache_salt=backend.salts[0])).status_code == 200
    first, again, *others = backend.salts
    assert first == again
    assert len({first, *others}) == 6, "and no client can make a salt of another key"
    assert not any("one" in salt or "two" in salt for salt in backend.salts)


async def test_prompt_kinds(client: Client, backend: ScriptedBackend, encoder: PromptEncoder) -> None:
    kinds: list[Any] = ["hello", [5, 6], ["hello"], [[5, 6], [7]]]
    for prompt in kinds:
        assert (await _post(client, COMPLETION, prompt=prompt)).status_code == 200
    text = encoder.encode_prompt("hello").ids
    assert [call[0] for call in backend.calls] == [text, (5, 6), text, (5, 6), (7,)]


async def test_pool_limit_names_the_setting(client: Client, backend: ScriptedBackend) -> None:
    backend.model = dataclasses.replace(backend.model, pool_limited=True)
    for change in ({"prompt": [1] * 64}, {"max_tokens": 64}):
        message = (await _post(client, COMPLETION, **change)).json()["error"]["message"]
        assert "KV pool" in message and "--kv-memory" in message and "64 tokens" in message


def _last_first() -> ScriptedBackend:
    """Each of the prompts [1], [2], [3] waits until all behind it have ended."""

    def script(prompt_ids: tuple[int, ...]) -> Iterator[Step]:
        name = str(prompt_ids[0])
        while backend.num_closed < 3 - prompt_ids[0]:
            yield 0.001
        yield from (delta(name), delta(), delta(name, "length", num_tokens=2))

    backend = ScriptedBackend(script)
    return backend


async def test_several_prompts(connect: Any) -> None:
    backend = _last_first()
    body = (await _post(connect(backend), COMPLETION, prompt=[[1], [2, 2], [3]])).json()
    assert [(each["index"], each["text"]) for each in body["choices"]] == [(0, "11"), (1, "22"), (2, "33")]
    assert body["usage"] == used(4, 12)
    assert backend.num_closed == 3


async def test_streamed_completion(client: Client) -> None:
    response = await _post(client, COMPLETION, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    events = read_events(response.text)
    assert len({each["id"] for each in events}) == 1
    assert all(each["object"] == "text_completion" and "usage" not in each for each in events)
    choices = [each["choices"][0] for each in events]
    assert [(each["text"], each["finish_reason"]) for each in choices] == [("Hel", None), ("lo", None), ("!", "stop")]


async def test_streamed_chat_with_usage(client: Client, backend: ScriptedBackend) -> None:
    events = read_events((await _post(client, CHAT, stream=True, stream_options=USAGE)).text)
    assert all(each["object"] == "chat.completion.chunk" for each in events)
    choices = [each["choices"][0] for each in events[:-1]]
    assert [(each["delta"], each["finish_reason"]) for each in choices] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "Hel"}, None),
        ({"content": "lo"}, None),
        ({"content": "!"}, "stop"),
    ]
    assert [each["usage"] for each in events[:-1]] == [None] * 4
    prompt_len = len(backend.calls[0][0])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == used(prompt_len, 4)


async def test_several_streamed_prompts(connect: Any) -> None:
    backend = _last_first()
    response = await _post(connect(backend), COMPLETION, prompt=[[1], [2], [3]], stream=True, stream_options=USAGE)
    events = read_events(response.text)
    choices = [each["choices"][0] for each in events[:-1]]
    assert choices[0]["index"] == 2
    for index in range(3):
        own = [(each["text"], each["finish_reason"]) for each in choices if each["index"] == index]
        assert own == [(str(index + 1), None), (str(index + 1), "length")]
    assert events[-1]["usage"]["completion_tokens"] == 12


async def test_text_beyond_ascii(connect: Any) -> None:
    client = connect(ScriptedBackend([delta("héllo 你好\n\n"), delta("🙂", "stop")]))
    assert (await _post(client, COMPLETION)).json()["choices"][0]["text"] == "héllo 你好\n\n🙂"
    events = read_events((await _post(client, COMPLETION, stream=True)).text)
    assert [each["choices"][0]["text"] for each in events] == ["héllo 你好\n\n", "🙂"]


FAILURES: list[tuple[Step, int, str, str]] = [
    (CapacityError("9 requests are open", 1.2), 429, "rate_limit_error", "9 requests are open"),
    (InvalidValueError("prompt", 5, "less"), 400, "invalid_request_error", "prompt: got 5, expected less"),
    (RuntimeError("secret"), 500, "server_error", "its log has the details"),
    (delta("", "error", error="it is gone"), 503, "server_error", "it is gone. The request may be sent again."),
    (delta("", "abort"), 503, "server_error", "aborted by the server"),
    (delta("", "error", error="all forbidden", fault=Fault.REQUEST), 400, "invalid_request_error", "all forbidden."),
    (delta("", "error", error="NaN", fault=Fault.MODEL), 500, "server_error", "NaN. The request would fail again."),
]
BASES = [COMPLETION, CHAT, {**COMPLETION, "prompt": [[1], [2]]}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("step", "status", "kind", "words"), FAILURES)
async def test_failure_before_the_first_token(
    connect: Any, caplog: Any, stream: bool, base: dict[str, Any], step: Step, status: int, kind: str, words: str
) -> None:
    backend = ScriptedBackend([step])
    response = await _post(connect(backend), base, stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (status, kind)
    assert words in error["message"] and "secret" not in response.text
    assert response.headers.get("retry-after") == ("2" if status == 429 else None)
    assert backend.num_closed == backend.num_opened
    logged = any(each.exc_info for each in caplog.records if each.levelno >= logging.ERROR)
    assert logged == isinstance(step, RuntimeError)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("step", "status", "kind", "words"), FAILURES)
async def test_failure_within_a_stream(
    connect: Any, base: dict[str, Any], step: Step, status: int, kind: str, words: str
) -> None:
    backend = ScriptedBackend([delta("x"), 0.02, step])
    response = await _post(connect(backend), base, stream=True, stream_options=USAGE)
    assert response.status_code == 200
    last = read_events(response.text)[-1]
    assert (last.keys(), last["error"]["type"]) == ({"error"}, kind)
    assert words in last["error"]["message"] and "secret" not in response.text
    assert backend.num_closed == backend.num_opened


async def test_stream_that_ends_without_a_reason(connect: Any) -> None:
    response = await _post(connect(ScriptedBackend([delta("x")])), COMPLETION)
    assert response.status_code == 500
    assert "ended early" in response.json()["error"]["message"]


async def test_models(client: Client, backend: ScriptedBackend) -> None:
    card = {"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "farsight", "max_model_len": 64}
    card |= {"emulated": None, "preset": None, "input_modalities": ["text"], "root": None}
    assert (await client.get("/v1/models")).json() == {"object": "list", "data": [card]}
    assert (await client.get(f"/v1/models/{MODEL}")).json() == card
    missing = await client.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    backend.model = dataclasses.replace(backend.model, name="org/name")
    assert (await client.get("/v1/models/org/name")).json()["id"] == "org/name"
    assert (await client.get("/v1/models/org%2Fname")).json()["id"] == "org/name"


async def test_health_and_ping_are_one(client: Client, backend: ScriptedBackend) -> None:
    assert (await client.get("/health")).json() == {"status": "ok"}
    for healthy, status in ((True, 200), (False, 503)):
        backend.is_healthy = healthy
        ways = [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("HEAD", "/ping")]
        assert {(await client.request(*way)).status_code for way in ways} == {status}
    assert (await client.get("/health")).json()["error"]["code"] == "unhealthy"


async def test_status(client: Client, backend: ScriptedBackend) -> None:
    row = {"name": "worker-0", "kind": "ModelWorker", "pid": 7, "node": "here", "state": "ready", "queue": 2}
    row |= {"last_step_age_s": 0.5, "restarts": 1, "http_port": 4321}
    row |= dict.fromkeys(("url", "breaker", "last_end", "degraded"), "")
    kv = {"num_blocks": 8, "free_blocks": 5, "num_host_blocks": 6, "free_host_blocks": 4, "flying_blocks": 1}
    kv |= {"offloads": 3, "uploads": 2, "offloaded_bytes": 3072, "uploaded_bytes": 2048, "refused_offloads": 1}
    learned = {"kind": "length-predictor words", "version": 3, "created_at": 1.7e9, "score": 12.5}
    status = {"actors": [row], "kv": kv | {"recomputed_tokens": 9}, "queue_delay_s": 1.25}
    learned |= {"num_examples": 4000, "current": True}
    status |= {key: [learned] for key in ("learned", "learnt")} | {"emulated": None, "no_forecasts": None}
    status |= {"processes": [], "preset": None}
    assert (await client.get("/status")).json() == status
    said: dict[str, Any] = {"emulated": "a100-7b", "no_forecasts": "Preset fcfs makes none.", "preset": "fcfs"}
    backend.model = dataclasses.replace(backend.model, **said)
    assert (await client.get("/status")).json() == status | said
    card = (await client.get(f"/v1/models/{MODEL}")).json()
    assert (card["emulated"], card["preset"]) == ("a100-7b", "fcfs")


async def test_openapi_tells_the_truth(client: Client) -> None:
    schema = (await client.get("/openapi.json")).json()
    operation = schema["paths"]["/v1/completions"]["post"]
    for path, kind in (("/metrics", "text/plain"), ("/dashboard", "text/html")):
        assert kind in schema["paths"][path]["get"]["responses"]["200"]["content"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert reference.endswith("/CompletionRequest")
    assert operation["responses"].keys() == {"200", "4XX", "5XX"}
    assert operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/Completion")
    assert "text/event-stream" in operation["responses"]["200"]["content"]
    assert len(schema["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]["anyOf"]) == 4
    assert (await client.get("/docs")).status_code == 200


@pytest.mark.parametrize(
    ("template", "code", "words"),
    [
        (None, "no_chat_template", "/v1/completions"),
        ("{{ raise_exception('alternate, please') }}", "chat_template_error", "alternate, please"),
        ("{{ messages[7].content.x }}", "chat_template_error", "no element 7"),
        ("{{ 1 / 0 }}", "chat_template_error", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "chat_template_error", "unsafe"),
    ],
)
async def test_templates_that_refuse(
    model_dir: Any, backend: ScriptedBackend, template: str | None, code: str, words: str
) -> None:
    app = application(backend, PromptEncoder(write_model_dir(model_dir, template)))
    async with client_on(app) as client:
        error = (await _post(client, CHAT)).json()["error"]
    assert (error["code"], error["param"]) == (code, "messages")
    assert words in error["message"]


async def test_roles_and_parts(client: Client, backend: ScriptedBackend, encoder: PromptEncoder) -> None:
    assert "developer" not in CHATML
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "someone"},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": None, "annotations": []},
    ]
    assert (await _post(client, CHAT, messages=messages, max_tokens=1)).status_code == 200
    plain = [("system", "be brief"), ("user", "one\ntwo"), ("assistant", "")]
    assert backend.calls[0][0] == chat_ids(encoder, [{"role": role, "content": text} for role, text in plain])


MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "it is"}]


async def test_a_prompt_becomes_the_tokens_that_run(client: Client, backend: ScriptedBackend) -> None:
    await ok(client, "/v1/completions", prompt="the cat")
    reply = await ok(client, "/tokenize", model=MODEL, prompt="the cat", return_token_strs=True)
    assert reply["tokens"] == list(backend.calls[0][0])
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), MAX_MODEL_LEN)
    assert "".join(reply["token_strs"]) == "<s>the cat"
    bare = await ok(client, "/tokenize", prompt="the cat", add_special_tokens=False)
    assert bare["tokens"] == reply["tokens"][1:]
    assert await ok(client, "/detokenize", tokens=reply["tokens"]) == {"prompt": "<s>the cat"}


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}, {"continue_final_message": True}])
async def test_messages_become_the_tokens_that_run(
    client: Client, backend: ScriptedBackend, fields: dict[str, bool]
) -> None:
    await ok(client, "/v1/chat/completions", messages=MESSAGES, **fields)
    assert (await ok(client, "/tokenize", messages=MESSAGES, **fields))["tokens"] == list(backend.calls[0][0])


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"model": "other", "prompt": "a"}, 404, "model"),
        ("/tokenize", {"prompt": "a" * 70_000}, 413, None),
        ("/detokenize", {"tokens": [300]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
async def test_wrong_bodies(client: Client, path: str, body: dict[str, object], status: int, param: str | None) -> None:
    response = await client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


async def test_version_and_load(client: Client) -> None:
    assert (await client.get("/version")).json() == {"version": importlib.metadata.version("farsight")}
    assert (await client.get("/load")).json() == {"server_load": 0}


async def test_the_home_page_is_the_chat_and_links_what_there_is(
    client: Client, backend: ScriptedBackend, encoder: PromptEncoder
) -> None:
    page = await client.get("/")
    assert page.status_code == 200 and page.text == (await client.get("/play")).text
    links = re.compile(r'data-page="([a-z/]*)"')
    assert {"play", "dashboard", "dashboard/requests", "docs"} <= set(links.findall(page.text))
    async with client_on(build_app(backend, encoder)) as alone:  # without operators
        assert set(links.findall((await alone.get("/")).text)) == {"", "play", "docs"}
        assert (await alone.get("/dashboard")).status_code == 404


async def test_slashes_head_and_options(client: Client) -> None:
    plain = await client.get("/v1/models")
    assert (await client.get("/v1/models/")).json() == plain.json()
    assert (await client.post("/v1/completions/", json={"prompt": "a"})).status_code == 200
    head = await client.head("/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    options = await client.options("/v1/chat/completions")
    assert (options.status_code, options.headers["allow"]) == (204, "OPTIONS, POST")
    assert (await client.options("/v1/models")).headers["allow"] == "GET, HEAD, OPTIONS"
    assert (await client.options("/nothing")).status_code == 404
    assert (await client.head("/v1/completions")).status_code == 405
