"""Good requests, whole and streamed, and failures of the backend."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from core.errors import CapacityError, InvalidValueError
from core.request import FLEX, NO_SLO, Fault, SamplingParams, Slo
from services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import (
    CHATML,
    MODEL,
    VOCAB_SIZE,
    ScriptedBackend,
    Step,
    application,
    delta,
    read_events,
    write_model_dir,
)

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hello"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
USAGE = {"include_usage": True}


def used(prompt: int, output: int, cached: int = 0) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    total = prompt + output
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": total,
        "prompt_tokens_details": details,
        "gpu_seconds": 0.0,
    }


async def _post(client: httpx.AsyncClient, base: dict[str, Any], key: str = "", **change: Any) -> httpx.Response:
    path = "/v1/chat/completions" if "messages" in base else "/v1/completions"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return await client.post(path, json={**base, **change}, headers=headers)


async def test_completion(client: httpx.AsyncClient, backend: ScriptedBackend, encoder: PromptEncoder) -> None:
    body = (await _post(client, COMPLETION)).json()
    prompt_len = len(encoder.encode_text("hello"))
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "text": "Hello!",
                "logprobs": None,
                "finish_reason": "stop",
                "token_ids": None,
                "prompt_token_ids": None,
                "prompt_logprobs": None,
            }
        ],
        "usage": used(prompt_len, 4),
        "service_tier": None,
    }
    assert backend.num_closed == backend.num_completed == 1


async def test_chat(client: httpx.AsyncClient, encoder: PromptEncoder, backend: ScriptedBackend) -> None:
    body = (await _post(client, CHAT)).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello!", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert backend.calls[0][0] == encoder.encode_chat(CHAT["messages"])


async def test_sampling_defaults(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    await _post(client, COMPLETION)
    await _post(client, COMPLETION)
    await _post(client, CHAT)
    sampling = [call[1] for call in backend.calls]
    assert [(each.temperature, each.top_p, each.top_k, each.stop) for each in sampling] == [(1.0, 1.0, 0, ())] * 3
    assert sampling[0].max_new_tokens == 16
    assert sampling[2].max_new_tokens == 64 - len(backend.calls[2][0])
    assert len({each.seed for each in sampling}) == 3


async def test_sampling_fields_reach_the_backend(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "seed": 2**64 - 1,
        "stop": ["a", "b"],
        "stop_token_ids": [3, 299],
        "ignore_eos": True,
        "min_p": 0.25,
        "repetition_penalty": 1.25,
        "presence_penalty": -2,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": -100, "008": 2.5},
        "min_tokens": 3,
        "benchmark_len": 4,
    }
    backend.model = dataclasses.replace(backend.model, benchmark_mode=True)
    for base in (COMPLETION, CHAT):
        assert (await _post(client, base, **fields)).status_code == 200
        expected = {**fields, "stop": ("a", "b"), "stop_token_ids": (3, 299), "logit_bias": ((7, -100.0), (8, 2.5))}
        expected["max_new_tokens"] = expected.pop("max_tokens")
        assert backend.calls[-1][1] == SamplingParams(**expected)


async def test_priority_reaches_the_backend(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    for base in (COMPLETION, CHAT):
        for given in ({"priority": -3, "n": 2}, {"priority": 7}, {"priority": None}, {}):
            assert (await _post(client, base, **given)).status_code == 200
    assert backend.priorities == [-3, -3, 7, 0, 0] * 2


async def test_tiers_are_priorities_and_the_answer_names_them(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    tiers = {"auto": "default", "default": "default", "priority": "priority", "flex": "flex", None: None}
    for base in (COMPLETION, CHAT):
        for asked, served in tiers.items():
            reply = await _post(client, base, service_tier=asked)
            assert reply.json()["service_tier"] == served
        chunks = read_events((await _post(client, base, service_tier="flex", priority=3, stream=True)).text)
        assert {chunk["service_tier"] for chunk in chunks} == {"flex"}
    assert backend.priorities == [0, 0, -1, FLEX, 0, FLEX + 3] * 2


async def test_wishes_reach_the_backend(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    for base in (COMPLETION, CHAT):
        for given in ({"deadline_s": 3, "slo": {"ttft": 0.5}}, {"slo": {"tpot": 0.1, "ttft": None}}, {"slo": None}):
            assert (await _post(client, base, **given)).status_code == 200
    assert backend.wishes == [(3.0, Slo(ttft_s=0.5)), (None, Slo(tpot_s=0.1)), (None, NO_SLO)] * 2


async def test_salts_reach_the_backend(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    for base in (COMPLETION, CHAT):
        for given in ({"cache_salt": "tenant", "n": 2}, {"cache_salt": None}, {}):
            assert (await _post(client, base, "key", **given)).status_code == 200
    assert backend.salts == ["tenant", "tenant", "", ""] * 2


async def test_keys_may_share_nothing(encoder: PromptEncoder, backend: ScriptedBackend) -> None:
    transport = httpx.ASGITransport(application(backend, encoder, shares_across_keys=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for key, salt in (("one", "x"), ("one", "x"), ("one", None), ("two", "x"), ("", "x"), ("", None)):
            assert (await _post(client, CHAT, key, cache_salt=salt)).status_code == 200
        assert (await _post(client, CHAT, cache_salt=backend.salts[0])).status_code == 200
    first, again, *others = backend.salts
    assert first == again
    assert len({first, *others}) == 6, "and no client can make a salt of another key"
    assert not any("one" in salt or "two" in salt for salt in backend.salts)


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 10**30}, "top_k", VOCAB_SIZE),
        ({"stop": "x"}, "stop", ("x",)),
        ({"temperature": 1}, "temperature", 1.0),
        ({"max_tokens": 6}, "max_new_tokens", 6),
    ],
)
async def test_normalised_fields(
    client: httpx.AsyncClient, backend: ScriptedBackend, change: dict[str, Any], field: str, value: Any
) -> None:
    await _post(client, COMPLETION, **change)
    assert getattr(backend.calls[0][1], field) == value


async def test_either_name_of_the_chat_limit(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    ways: list[dict[str, Any]] = [
        {"max_tokens": 5},
        {"max_completion_tokens": 5},
        {"max_tokens": 5, "max_completion_tokens": 5},
    ]
    for limits in ways:
        await _post(client, CHAT, **limits)
    assert [call[1].max_new_tokens for call in backend.calls] == [5, 5, 5]


async def test_default_limit_shrinks_to_the_room_left(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    assert (await _post(client, COMPLETION, prompt=[1] * 60)).status_code == 200
    assert backend.calls[0][1].max_new_tokens == 4


async def test_prompt_kinds(client: httpx.AsyncClient, backend: ScriptedBackend, encoder: PromptEncoder) -> None:
    kinds: list[Any] = ["hello", [5, 6], ["hello"], [[5, 6], [7]]]
    for prompt in kinds:
        assert (await _post(client, COMPLETION, prompt=prompt)).status_code == 200
    text = encoder.encode_text("hello")
    assert [call[0] for call in backend.calls] == [text, (5, 6), text, (5, 6), (7,)]


async def test_pool_limit_names_the_setting(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
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


async def test_several_prompts_run_at_once(connect: Any) -> None:
    """None goes on before all have begun."""

    def script(prompt_ids: tuple[int, ...]) -> Iterator[Step]:
        while backend.num_opened < 10:
            yield 0.001
        yield delta("x", "stop")

    backend = ScriptedBackend(script)
    async with asyncio.timeout(120.0):
        assert (await _post(connect(backend), COMPLETION, prompt=[[1]] * 10)).status_code == 200


async def test_streamed_completion(client: httpx.AsyncClient) -> None:
    response = await _post(client, COMPLETION, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    events = read_events(response.text)
    assert len({each["id"] for each in events}) == 1
    assert all(each["object"] == "text_completion" and "usage" not in each for each in events)
    choices = [each["choices"][0] for each in events]
    assert [(each["text"], each["finish_reason"]) for each in choices] == [("Hel", None), ("lo", None), ("!", "stop")]


async def test_streamed_chat_with_usage(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    events = read_events((await _post(client, CHAT, stream=True, stream_options=USAGE)).text)
    assert all(each["object"] == "chat.completion.chunk" for each in events)
    choices = [each["choices"][0] for each in events[:-1]]
    assert [(each["delta"], each["finish_reason"]) for each in choices] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "Hel"}, None),
        ({"content": "lo"}, None),
        ({"content": "!"}, None),
        ({}, "stop"),
    ]
    assert [each["usage"] for each in events[:-1]] == [None] * 5
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("base", [COMPLETION, CHAT, {**COMPLETION, "prompt": [[1], [2]]}])
@pytest.mark.parametrize(
    ("step", "status", "words"),
    [
        (CapacityError("9 requests are open", 1.2), 429, "9 requests are open"),
        (InvalidValueError("prompt", 5, "less"), 400, "prompt: got 5, expected less"),
        (RuntimeError("secret"), 500, "its log has the details"),
        (delta("", "error", error="the worker is gone"), 503, "the worker is gone"),
        (delta("", "abort"), 503, "aborted by the server"),
        (delta("", "error", error="all are forbidden", fault=Fault.REQUEST), 400, "all are forbidden."),
        (
            delta("", "error", error="logits hold NaN", fault=Fault.MODEL),
            500,
            "hold NaN. The request would fail again.",
        ),
    ],
)
async def test_failure_before_the_first_token(
    connect: Any,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    base: dict[str, Any],
    step: Step,
    status: int,
    words: str,
) -> None:
    backend = ScriptedBackend([step])
    response = await _post(connect(backend), base, stream=stream)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]
    assert response.headers.get("retry-after") == ("2" if status == 429 else None)
    assert "secret" not in response.text
    assert backend.num_closed == backend.num_opened
    logged = any(each.exc_info for each in caplog.records if each.levelno >= logging.ERROR)
    assert logged == isinstance(step, RuntimeError)


@pytest.mark.parametrize("base", [COMPLETION, CHAT, {**COMPLETION, "prompt": [[1], [2]]}])
@pytest.mark.parametrize(
    ("step", "kind", "words"),
    [
        (CapacityError("full", 1), "rate_limit_error", "full"),
        (RuntimeError("secret"), "server_error", "log"),
        (delta("", "error", error="the worker is gone"), "server_error", "may be sent again"),
        (
            delta("", "error", error="all are forbidden", fault=Fault.REQUEST),
            "invalid_request_error",
            "all are forbidden",
        ),
        (delta("", "error", error="logits hold NaN", fault=Fault.MODEL), "server_error", "would fail again"),
    ],
)
async def test_failure_within_a_stream(connect: Any, base: dict[str, Any], step: Step, kind: str, words: str) -> None:
    backend = ScriptedBackend([delta("x"), 0.02, step])
    response = await _post(connect(backend), base, stream=True, stream_options=USAGE)
    assert response.status_code == 200
    events = read_events(response.text)
    assert events[-1].keys() == {"error"}
    assert events[-1]["error"]["type"] == kind
    assert words in events[-1]["error"]["message"]
    assert "secret" not in response.text
    assert backend.num_closed == backend.num_opened


async def test_failure_within_a_whole_answer(connect: Any) -> None:
    response = await _post(connect(ScriptedBackend([delta("x"), RuntimeError("secret")])), COMPLETION)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


async def test_stream_that_ends_without_a_reason(connect: Any) -> None:
    response = await _post(connect(ScriptedBackend([delta("x")])), COMPLETION)
    assert response.status_code == 500
    assert "ended early" in response.json()["error"]["message"]


async def test_models(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    card = {"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "farsight", "max_model_len": 64}
    card |= {"emulated": None, "root": None}
    assert (await client.get("/v1/models")).json() == {"object": "list", "data": [card]}
    assert (await client.get(f"/v1/models/{MODEL}")).json() == card
    missing = await client.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    backend.model = dataclasses.replace(backend.model, name="org/name")
    assert (await client.get("/v1/models/org/name")).json()["id"] == "org/name"
    assert (await client.get("/v1/models/org%2Fname")).json()["id"] == "org/name"


async def test_health(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    assert (await client.get("/health")).json() == {"status": "ok"}
    backend.is_healthy = False
    response = await client.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "unhealthy"


LEARNT = {
    "kind": "length-predictor words",
    "version": 3,
    "created_at": 1.7e9,
    "score": 12.5,
    "num_examples": 4000,
    "current": True,
}


async def test_status(client: httpx.AsyncClient) -> None:
    row = {"name": "worker-0", "kind": "ModelWorker", "pid": 7, "node": "here", "state": "ready", "queue": 2}
    assert (await client.get("/status")).json() == {
        "actors": [
            {**row, "last_step_age_s": 0.5, "restarts": 1, "http_port": 4321}
            | {"url": "", "breaker": "", "last_end": "", "degraded": ""}
        ],
        "kv": {
            "num_blocks": 8,
            "free_blocks": 5,
            "num_host_blocks": 6,
            "free_host_blocks": 4,
            "flying_blocks": 1,
            "offloads": 3,
            "uploads": 2,
            "offloaded_bytes": 3072,
            "uploaded_bytes": 2048,
            "refused_offloads": 1,
            "recomputed_tokens": 9,
        },
        "learnt": [LEARNT],
        "emulated": None,
        "queue_delay_s": 1.25,
        "no_forecasts": None,
    }


async def test_it_is_said_where_no_request_gets_a_forecast(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.model = dataclasses.replace(backend.model, no_forecasts="Preset fcfs makes none.")
    assert (await client.get("/status")).json()["no_forecasts"] == "Preset fcfs makes none."


async def test_made_up_answers_are_said_to_be(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.model = dataclasses.replace(backend.model, emulated="a100-7b")
    assert (await client.get(f"/v1/models/{MODEL}")).json()["emulated"] == "a100-7b"
    assert (await client.get("/status")).json()["emulated"] == "a100-7b"


async def test_openapi_tells_the_truth(client: httpx.AsyncClient) -> None:
    schema = (await client.get("/openapi.json")).json()
    operation = schema["paths"]["/v1/completions"]["post"]
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
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        error = (await _post(client, CHAT)).json()["error"]
    assert (error["code"], error["param"]) == (code, "messages")
    assert words in error["message"]


async def test_roles_and_parts(client: httpx.AsyncClient, backend: ScriptedBackend, encoder: PromptEncoder) -> None:
    assert "developer" not in CHATML
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "someone"},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": None, "annotations": []},
    ]
    assert (await _post(client, CHAT, messages=messages, max_tokens=1)).status_code == 200
    plain = [("system", "be brief"), ("user", "one\ntwo"), ("assistant", "")]
    assert backend.calls[0][0] == encoder.encode_chat([{"role": role, "content": text} for role, text in plain])
