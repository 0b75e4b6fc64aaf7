"""What is said to another server, and how its answers are understood."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from farsight.actors.external.openai_wire import (
    BackendFailed,
    Chunk,
    EventReader,
    ListedModel,
    TokenUsage,
    by_text,
    by_tokens,
    find_model,
    parse_chunk,
    refusal,
)
from farsight.core.request import PromptSource, Request, SamplingParams
from farsight.services.api.schemas import CompletionRequest


def body(sampling: SamplingParams, resumed: tuple[int, ...] = ()) -> dict[str, Any]:
    call = by_tokens(Request("r", 0, "i", (5, 6), sampling, resumed), "m")
    assert call.path == "/v1/completions"
    return call.body


def test_the_whole_of_sampling_is_said() -> None:
    said = body(
        SamplingParams(
            max_new_tokens=9,
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            seed=2**64 - 1,
            stop=("x", "y"),
            stop_token_ids=(3,),
            ignore_eos=True,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            logit_bias=((4, -1.0),),
            min_tokens=2,
        )
    )
    assert said == {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "seed": 2**63 - 1,
        "stop": ["x", "y"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"4": -1.0},
        "min_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    CompletionRequest.model_validate(said)  # our own server takes it


def test_neutral_values_are_said_too_and_keep_out_the_defaults_of_others() -> None:
    said = body(SamplingParams(9))
    assert (said["top_k"], said["top_p"], said["min_p"], said["repetition_penalty"]) == (-1, 1.0, 0.0, 1.0)
    assert said["temperature"] == 0 and not said.keys() & {"seed", "stop", "logit_bias", "min_tokens", "ignore_eos"}
    CompletionRequest.model_validate(said)


def test_who_must_not_share_cached_prefixes_does_not_share_them_there() -> None:
    salts = []
    for salt in ("mine\0", "yours\0" + "x" * 1024):
        said = by_tokens(Request("r", 0, "i", (5,), SamplingParams(9), cache_salt=salt), "m").body
        CompletionRequest.model_validate(said)
        salts.append(said["cache_salt"])
    assert len(set(salts)) == 2 and not any("mine" in salt for salt in salts)


def test_what_has_been_put_out_goes_with_the_prompt_and_off_the_limits() -> None:
    said = body(SamplingParams(9, min_tokens=4), (7, 8, 9))
    assert (said["prompt"], said["max_tokens"], said["min_tokens"]) == ([5, 6, 7, 8, 9], 6, 1)
    assert "min_tokens" not in body(SamplingParams(9, min_tokens=3), (7, 8, 9))


SGLANG_FIELDS = {
    *("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "seed", "stop", "logit_bias", "stream", "stream_options"),
    *("stop_token_ids", "ignore_eos", "skip_special_tokens", "min_tokens", "cache_salt"),
}
"""Fields of SGLang's ``CompletionRequest`` (0.5.23) that we may send; it drops others without a word.

The package index has no build of it for CPUs, so no test runs it. What it is taken to say below, its
``CompletionStreamResponse`` and ``ErrorResponse`` write, field by field.
"""


def test_every_sampling_parameter_has_a_field_at_sglang() -> None:
    sampling = SamplingParams(9, 0.7, seed=1, stop=("x",), stop_token_ids=(3,), ignore_eos=True, min_tokens=2)
    call = by_tokens(Request("r", 0, "i", (5,), sampling, cache_salt="s"), "m")
    assert call.body.keys() <= SGLANG_FIELDS


CHAT = PromptSource(messages=(("system", "Be short."), ("user", "Hi")))


def decoded(token_ids: Sequence[int], before: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


@pytest.mark.parametrize(
    ("source", "resumed", "path", "fields"),
    [
        (PromptSource("Hi"), (), "/v1/completions", {"prompt": "Hi"}),
        (PromptSource("Hi"), (33,), "/v1/completions", {"prompt": "Hi!", "max_tokens": 8}),
        (None, (33,), "/v1/completions", {"prompt": "AB!", "max_tokens": 8}),
        (
            *(CHAT, (), "/v1/chat/completions"),
            {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]},
        ),
    ],
)
def test_text_goes_as_it_was_written(
    source: PromptSource | None, resumed: tuple[int, ...], path: str, fields: dict[str, Any]
) -> None:
    call = by_text(Request("r", 0, "i", (65, 66), SamplingParams(9), resumed, source=source), "m", decoded)
    common = {"model": "m", "max_tokens": 9, "temperature": 0, "top_p": 1.0, "presence_penalty": 0}
    streams = {"frequency_penalty": 0, "stream": True, "stream_options": {"include_usage": True}}
    assert (call.path, call.body) == (path, {**common, **streams, **fields})


def test_beside_text_extensions_are_said_only_where_they_change_something() -> None:
    sampling = SamplingParams(9, top_k=3, min_tokens=2)
    call = by_text(Request("r", 0, "i", (65,), sampling, source=CHAT), "m", decoded)
    assert (call.body["top_k"], call.body["min_tokens"]) == (3, 2)
    assert "min_p" not in call.body


def test_a_chat_that_another_replica_has_begun_to_answer_cannot_go_on_as_text() -> None:
    with pytest.raises(BackendFailed, match="cannot continue it") as caught:
        by_text(Request("r", 0, "i", (65,), SamplingParams(9), (33,), source=CHAT), "m", decoded)
    assert caught.value.failure.of_request


def test_events_may_be_cut_anywhere() -> None:
    stream = b': hello\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": 2}\n\ndata: [DONE]\n\n'
    for size in range(1, len(stream)):
        reader = EventReader()
        components = [stream[at : at + size] for at in range(0, len(stream), size)]
        found = [event for component in components for event in reader.feed(component)]
        assert found == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"], size


def chunk(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def sglang_chunk(text: str, reason: str = "null", matched: str = "null") -> bytes:
    head = '{"id":"8d1f","object":"text_completion","created":1764000000,"model":"m"'
    said = f'"text":{text},"logprobs":null,"finish_reason":{reason},"matched_stop":{matched}'
    return f'{head},"choices":[{{"index":0,{said}}}],"usage":null}}'.encode()


def sglang_error(message: str, code: int) -> bytes:
    error = {"object": "error", "message": message, "type": "E", "param": None, "code": code}
    return json.dumps({"error": error}).encode()


def test_chunks_of_sglang_are_read() -> None:
    assert parse_chunk(sglang_chunk('"one"'), "m") == Chunk("one")
    assert parse_chunk(sglang_chunk('" two"', '"stop"', "2"), "m") == Chunk(" two", "stop")
    told = {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3, "reasoning_tokens": 0}
    assert parse_chunk(chunk(choices=[], usage=told), "m") == Chunk("", None, TokenUsage(3))


def test_chunks_are_read() -> None:
    text = chunk(choices=[{"index": 0, "text": "hi", "finish_reason": None, "logprobs": None}], usage=None)
    assert parse_chunk(text, "m") == Chunk("hi")
    chat = chunk(choices=[{"index": 0, "delta": {"role": "assistant", "content": "hi"}, "finish_reason": None}])
    assert parse_chunk(chat, "m") == Chunk("hi")
    assert parse_chunk(chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]), "m") == Chunk("", "stop")
    last = chunk(choices=[{"index": 0, "text": "", "finish_reason": "length"}])
    assert parse_chunk(last, "m") == Chunk("", "length")
    details = {"completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
    assert parse_chunk(chunk(choices=[], usage=details), "m") == Chunk("", None, TokenUsage(5, 3))
    assert parse_chunk(chunk(choices=[], usage={"completion_tokens": 5, "prompt_tokens_details": None}), "m") == Chunk(
        "", None, TokenUsage(5)
    )
    assert parse_chunk(b'{"choices": []}', "m") == Chunk(""), "who does not say its model is believed"


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b"not json", "protocol", "expected a JSON object, got not json"),
        (b"[1]", "protocol", "expected a JSON object"),
        (b'{"model": "m"}', "protocol", "exactly one choice"),
        (chunk(choices=[{"text": 5}]), "protocol", "a chunk with text"),
        (chunk(choices=[1]), "protocol", "a chunk with text"),
        (chunk(choices=[{}, {}]), "protocol", "exactly one choice"),
        (b'{"error": {"message": "out of luck"}}', "broken", "the server reports: out of luck"),
        (b'{"error": {"message": "what a prompt", "code": 400}}', "request", "the server reports: what a prompt"),
        (sglang_error("Generation aborted.", 500), "broken", "the server reports: Generation aborted."),
        (sglang_error("too long", 400), "request", "the server reports: too long"),
        (sglang_chunk('""', '"abort"'), "broken", "the server has aborted the request"),
        (b'{"model": "other", "choices": []}', "model", "the server answers as model 'other', expected 'm'"),
    ],
)
def test_chunks_that_are_none_are_refused(data: bytes, kind: str, message: str) -> None:
    with pytest.raises(BackendFailed, match=message) as caught:
        parse_chunk(data, "m")
    assert (caught.value.failure.kind, caught.value.failure.trips) == (kind, kind == "model")


def test_models_are_found_with_their_lengths() -> None:
    listed = json.dumps({"data": [{"id": "x"}, {"id": "m", "max_model_len": 77}]}).encode()
    assert find_model(listed, "m") == ListedModel("m", 77)
    assert find_model(listed, "x") == ListedModel("x", None)
    with pytest.raises(BackendFailed, match="the server serves 'x', 'm', expected 'y'") as caught:
        find_model(listed, "y")
    assert caught.value.failure.trips
    for wrong in (b"", b"{}", b'{"data": [1]}'):
        with pytest.raises(BackendFailed) as caught:
            find_model(wrong, "m")
        assert caught.value.failure.kind == "protocol"


@pytest.mark.parametrize(
    ("status", "data", "kind", "message", "trips", "of_request"),
    [
        (400, b'{"error": {"message": "too long"}}', "request", "HTTP 400: too long", False, True),
        (
            400,
            b'{"object": "error", "message": "too large", "code": 400}',
            "request",
            "HTTP 400: too large",
            False,
            True,
        ),
        (422, b'{"detail": "what?"}', "request", "HTTP 422: what?", False, True),
        (401, b'{"error": "no key"}', "auth", "HTTP 401: no key", True, False),
        (404, b'{"object": "error", "message": "no model"}', "model", "HTTP 404: no model", True, False),
        (429, b"", "busy", "HTTP 429: an empty reply", False, False),
        (503, b"<html>", "busy", "HTTP 503: <html>", False, False),
        (500, b"[]", "http", "HTTP 500: []", False, False),
    ],
)
def test_other_statuses_are_told_apart(
    status: int, data: bytes, kind: str, message: str, trips: bool, of_request: bool
) -> None:
    failure = refusal(status, data)
    assert (failure.kind, failure.message, failure.trips, failure.of_request) == (kind, message, trips, of_request)


def test_what_a_server_may_lack_is_no_fault_of_it() -> None:
    assert refusal(404, b"", may_lack=True).of_request
