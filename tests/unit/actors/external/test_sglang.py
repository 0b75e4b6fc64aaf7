"""SGLang as a replica, by a conversation after the classes of its package (sglang 0.5.23, ``entrypoints/openai``).

The package index has no build of it for CPUs, so no test runs it. The bytes are what its ``CompletionStreamResponse``,
``ModelCard`` and ``ErrorResponse`` write, field by field; the HTTP between is real.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from actors.external.openai_wire import by_tokens
from core.request import Request, SamplingParams
from tests.unit.actors.components import until
from tests.unit.actors.external.test_backend import REQUEST, Replica, served
from tests.unit.actors.openai_double import MODEL, OpenAIDouble

CARD = {"id": MODEL, "object": "model", "created": 1764000000, "owned_by": "sglang", "root": MODEL, "parent": None}
FIELDS = {
    *("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "seed", "stop", "logit_bias", "stream", "stream_options"),
    *("stop_token_ids", "ignore_eos", "skip_special_tokens", "min_tokens", "cache_salt"),
}
"""Fields of its ``CompletionRequest`` that we may send; it drops others without a word."""

CHUNK = (
    '{"id":"8d1f","object":"text_completion","created":1764000000,"model":"m","choices":[{"index":0,"text":%s,'
    '"logprobs":null,"finish_reason":%s,"matched_stop":%s}],"usage":null}'
)
USAGE = (
    '{"id":"8d1f","object":"text_completion","created":1764000000,"model":"m","choices":[],'
    '"usage":{"prompt_tokens":3,"total_tokens":6,"completion_tokens":3,"reasoning_tokens":0%s}}'
)
CACHED = ',"prompt_tokens_details":{"cached_tokens":2}'
"""Told if the server was started with ``--enable-cache-report``."""


def error(message: str, code: int) -> str:
    return f'{{"error": {{"object": "error", "message": "{message}", "type": "E", "param": null, "code": {code}}}}}'


@dataclass
class SGLangDouble(OpenAIDouble):
    """Says these events to every request but the probes of one token; with ``refuses``, that is its answer instead."""

    models: list[dict[str, Any]] = field(default_factory=lambda: [{**CARD, "max_model_len": 1000}])
    events: tuple[str, ...] = ()
    refuses: dict[str, Any] | None = None

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["max_tokens"] > 1:
            self.bodies.append(body)
            if self.refuses is not None:
                return web.json_response(self.refuses, status=400)
        said = self.events if body["max_tokens"] > 1 else (CHUNK % ('"x"', '"length"', "null"), USAGE % "")
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await reply.prepare(request)
        for event in (*said, "[DONE]"):
            await reply.write(f"data: {event}\n\n".encode())
        return reply


@asynccontextmanager
async def sglang(*events: str, refuses: dict[str, Any] | None = None) -> AsyncIterator[tuple[OpenAIDouble, Replica]]:
    async with served(SGLangDouble(events=events, refuses=refuses)) as (double, replica):
        yield double, replica


@pytest.mark.parametrize(("cached", "cached_len"), [("", 0), (CACHED, 2)])
async def test_a_completion(cached: str, cached_len: int) -> None:
    texts = [CHUNK % (text, "null", "null") for text in ('"one"', '" two"')]
    async with sglang(*texts, CHUNK % ('" three"', '"stop"', "2"), USAGE % cached) as (double, replica):
        await replica.submit(REQUEST)
        deltas = await replica.end_of()
        assert "".join(each.text for each in deltas) == "one two three"
        assert sum(each.num_unnamed for each in deltas) == 3
        assert (deltas[-1].finish_reason, deltas[-1].cached_len) == ("stop", cached_len)
        assert replica.listener.ready is not None and replica.listener.ready.max_model_len == 1000
        assert double.bodies[0]["prompt"] == list(REQUEST.prompt_ids)
        assert double.bodies[0].keys() <= FIELDS


async def test_every_sampling_parameter_has_a_field_over_there() -> None:

    sampling = SamplingParams(9, 0.7, seed=1, stop=("x",), stop_token_ids=(3,), ignore_eos=True, min_tokens=2)
    call = by_tokens(Request("r", 0, "i", (5,), sampling, cache_salt="s"), MODEL)
    assert call.body.keys() <= FIELDS


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (error("Generation aborted.", 500), "the server reports: Generation aborted."),
        (error("too long", 400), "the server reports: too long"),
        (CHUNK % ('""', '"abort"', "null"), "the server has aborted the request"),
    ],
)
async def test_an_output_that_it_breaks_off_is_no_answer(event: str, message: str) -> None:
    async with sglang(CHUNK % ('"one"', "null", "null"), event) as (_, replica):
        await replica.submit(REQUEST)
        assert message in str((await replica.end_of())[-1].error)


async def test_a_refusal_in_its_form_is_told_and_opens_no_breaker() -> None:
    refusal = {"object": "error", "message": "max_tokens is too large", "type": "B", "param": None, "code": 400}
    async with sglang(refuses=refusal) as (_, replica):
        await replica.submit(REQUEST)
        assert "HTTP 400: max_tokens is too large" in str((await replica.end_of())[-1].error)
        await until(lambda: replica.component.breaker == "closed")
