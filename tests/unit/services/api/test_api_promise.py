"""The headers that tell when an answer will end, and the same of a request in flight."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing

import httpx
import pytest
from starlette.types import Message

from core.decisions import Decision, Facts
from core.messages.tokens import TokenDelta
from core.promise import Promise
from core.request import Request
from services.api.answers import sse
from services.api.answers.sse import EventStream
from services.api.promised import ANSWER, AnswerPromise
from services.api.text.prompts import PromptEncoder, PromptText
from tests.unit.services.api.api_support import MODEL, ScriptedBackend, application
from tests.unit.services.api.test_api_explain import ask, key, trace_of


class PromisingBackend(ScriptedBackend):
    """Promises 1 s to the first request, 2 s to the second, and so on, as it takes them; ``silent`` gets none."""

    silent = 0

    async def stream(
        self, request: Request, text: PromptText | None = None, key: str = ""
    ) -> AsyncGenerator[TokenDelta, None]:
        answer, number = ANSWER.get(), self.num_opened + 1
        if answer is not None and number != self.silent:
            answer.add(Promise(f"r{number}", 0, float(number), 10.0 * number, coarse=number == 2))
        async with aclosing(super().stream(request, text, key)) as deltas:
            async for each in deltas:
                yield each


@pytest.fixture
def promising() -> PromisingBackend:
    return PromisingBackend()


@pytest.fixture
async def client(promising: PromisingBackend, encoder: PromptEncoder) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(application(promising, encoder)), base_url="http://test")


@pytest.mark.parametrize("stream", [False, True])
async def test_every_answer_says_when_it_will_end(client: httpx.AsyncClient, stream: bool) -> None:
    body = {"model": MODEL, "prompt": "hello", "stream": stream}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200
    assert (reply.headers["farsight-eta-p50"], reply.headers["farsight-eta-p90"]) == ("1.000", "10.000")
    assert "farsight-eta-coarse" not in reply.headers


async def test_an_answer_ends_with_the_last_of_its_requests(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": MODEL, "messages": messages, "n": 2}
    reply = await client.post("/v1/chat/completions", json=body)
    assert (reply.headers["farsight-eta-p50"], reply.headers["farsight-eta-p90"]) == ("2.000", "20.000")
    assert reply.headers["farsight-eta-coarse"] == "true"


async def test_nothing_is_said_before_every_request_has_a_promise(
    client: httpx.AsyncClient, promising: PromisingBackend
) -> None:
    promising.silent = 2
    reply = await client.post("/v1/completions", json={"model": MODEL, "prompt": "hello", "n": 2})
    assert reply.status_code == 200 and not [name for name in reply.headers if name.startswith("farsight-eta")]


async def test_a_large_body_is_told_too(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "hello", "user": "x" * 200_000}
    reply = await client.post("/v1/completions", json=body)
    assert reply.headers["farsight-eta-p50"] == "1.000"


async def sent(events: AsyncGenerator[bytes, None], answer: AnswerPromise) -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    ANSWER.set(answer)
    await EventStream(events)({"type": "http"}, receive, send)
    return messages


@pytest.mark.parametrize("fails", [False, True])
async def test_a_client_that_waits_long_is_told_before_the_first_token(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(sse, "EARLY_S", 0.0)
    answer, begun = AnswerPromise(1), asyncio.Event()
    answer.add(Promise("r", 0, 60.0, 90.0))
    begin = EventStream._begin

    async def noted(self: EventStream, send: object) -> None:
        await begin(self, send)  # type: ignore[arg-type]
        begun.set()

    monkeypatch.setattr(EventStream, "_begin", noted)

    async def events() -> AsyncGenerator[bytes, None]:
        await begun.wait()
        if fails:
            raise RuntimeError("the worker died")
        yield b"data: x\n\n"

    head, *bodies = await sent(events(), answer)
    assert (head["status"], dict(head["headers"])[b"farsight-eta-p50"]) == (200, b"60.000")
    text = b"".join(each["body"] for each in bodies)
    assert (b'"error"' in text) is fails and not bodies[-1]["more_body"]


async def test_without_a_promise_the_status_line_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "EARLY_S", 0.0)

    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(5):
            await asyncio.sleep(0)
        raise ValueError("refused")
        yield b""

    with pytest.raises(ValueError, match="refused"):
        await sent(events(), AnswerPromise(1))


async def test_a_request_in_flight_tells_its_state_and_its_end(
    client: httpx.AsyncClient, promising: PromisingBackend
) -> None:
    response_id = await ask(client, "mine")
    (origin,) = promising.origins
    assert origin is not None
    facts: Facts = {"state": "running", "output_tokens": 7, "p50_s": 3.0, "p90_s": 9.0, "coarse": 1}
    promising.traces = [
        trace_of(origin, "ingress", Decision("received", 1.0, {}), ended=False),
        trace_of(origin, "0", Decision("outlook", 2.0, facts), ended=False),
    ]
    (choice,) = (await client.get(f"/v1/requests/{response_id}", headers=key("mine"))).json()["choices"]
    assert (choice["status"], choice["state"], choice["output_tokens"]) == ("running", "running", 7)
    assert (choice["eta_p50"], choice["eta_p90"], choice["eta_coarse"]) == (3.0, 9.0, True)
    assert choice["age_s"] > 0
    other = await client.get(f"/v1/requests/{response_id}", headers=key("other"))
    assert other.status_code == 404 and "eta" not in other.text

    promising.traces = [dataclasses.replace(each, ended=True) for each in promising.traces]
    (choice,) = (await client.get(f"/v1/requests/{response_id}", headers=key("mine"))).json()["choices"]
    assert (choice["status"], choice["state"], choice["eta_p50"], choice["age_s"]) == ("ended", None, None, None)


def test_promises_add_up_to_the_last_end() -> None:
    answer = AnswerPromise(2)
    answer.add(Promise("a", 0, 5.0, 6.0))
    assert answer.headers() == {}
    answer.add(Promise("b", 0, 1.0, 8.0))
    answer.add(Promise("b", 1, math.inf, math.inf))
    assert answer.headers() == {"farsight-eta-p50": "5.000", "farsight-eta-p90": "8.000"}
