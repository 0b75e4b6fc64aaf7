"""Health without a Supervisor, and requests that come while the service drains."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from services.api.readiness import DrainGate, Readiness
from services.api.requests import generation_of
from services.api.schemas import CompletionRequest
from services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import ScriptedBackend, whole_app

SILENCE_S = 5.0
BODY = {"model": "test-model", "prompt": "x", "max_tokens": 2}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def readiness(clock: Clock) -> Readiness:
    return Readiness(SILENCE_S, clock)


@pytest.fixture
async def http(
    backend: ScriptedBackend, encoder: PromptEncoder, readiness: Readiness
) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(whole_app(backend, encoder, readiness=readiness))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def test_a_service_that_nobody_watches_is_unhealthy(
    http: httpx.AsyncClient, readiness: Readiness, clock: Clock
) -> None:
    clock.now = SILENCE_S
    for path in ("/health", "/health/ready"):
        reply = await http.get(path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unhealthy")
    readiness.attended()
    for path in ("/health", "/health/ready"):
        assert (await http.get(path)).status_code == 200


async def test_a_draining_service_is_healthy_but_not_ready(http: httpx.AsyncClient, readiness: Readiness) -> None:
    readiness.is_draining = True
    assert (await http.get("/health")).status_code == 200
    reply = await http.get("/health/ready")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("content", [b"{}", b"not JSON", b'{"stream": true}'])
async def test_a_request_that_comes_too_late_is_told_to_come_again(
    http: httpx.AsyncClient, readiness: Readiness, path: str, content: bytes
) -> None:
    readiness.is_draining = True
    reply = await http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert (reply.status_code, reply.headers["Retry-After"]) == (503, "1")
    error = reply.json()["error"]
    assert (set(error), error["type"], error["code"]) == (
        {"message", "type", "param", "code"},
        "server_error",
        "draining",
    )


async def test_other_requests_are_answered_while_it_drains(http: httpx.AsyncClient, readiness: Readiness) -> None:
    readiness.is_draining = True
    for path in ("/v1/models", "/status", "/metrics"):
        assert (await http.get(path)).status_code == 200


async def test_a_resumed_stream_is_counted_and_not_refused() -> None:
    """It has begun before the drain, so the drain waits for it."""
    readiness = Readiness()
    readiness.is_draining = True
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope["path"], readiness.num_open))

    gate = DrainGate(app, readiness)
    for path in ("/v1/streams/" + "0" * 32, "/v1/models"):
        await gate({"type": "http", "method": "GET", "path": path}, None, None)  # type: ignore[arg-type]
    assert [num for _, num in seen] == [1, 0]
    assert readiness.num_open == 0


async def test_open_requests_are_counted_until_they_end_or_fail(
    http: httpx.AsyncClient, readiness: Readiness, backend: ScriptedBackend
) -> None:
    seen = []
    stream = backend.stream

    def watched(*args: object, **named: object) -> object:
        seen.append(readiness.num_open)
        return stream(*args, **named)  # type: ignore[arg-type]

    backend.stream = watched  # type: ignore[assignment, method-assign]
    reply = await http.post("/v1/completions", json=BODY | {"model": backend.model.name})
    assert (reply.status_code, seen, readiness.num_open) == (200, [1], 0)
    assert (await http.post("/v1/completions", content=b"x")).status_code == 415
    assert readiness.num_open == 0


async def test_a_request_names_the_weights_that_new_requests_run_on(
    backend: ScriptedBackend, encoder: PromptEncoder
) -> None:
    """The log of a resumable stream keeps it, so that no other weights go on with the stream."""
    model = dataclasses.replace(backend.model, version=3)
    generation = await generation_of(CompletionRequest.model_validate(BODY | {"model": model.name}), model, encoder)
    assert [each.model_version for each in generation.named(b"", str).requests] == [3]
