"""How work is let in: readiness, draining, refusals of a full service, and turns of the event loop."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from farsight.core.errors import CapacityError
from farsight.services.api.middleware import PER_TURN, BodyLimit, LoopPace
from farsight.services.api.readiness import DrainGate, Readiness
from farsight.services.api.requests import generation_of
from farsight.services.api.schemas import CompletionRequest
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import Client, ScriptedBackend, client_on, whole_app

PATHS = ("/v1/completions", "/v1/chat/completions")
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
def http(backend: ScriptedBackend, encoder: PromptEncoder, readiness: Readiness) -> Client:
    return client_on(whole_app(backend, encoder, readiness=readiness))


async def test_a_service_that_nobody_watches_is_unhealthy(http: Client, readiness: Readiness, clock: Clock) -> None:
    clock.now = SILENCE_S
    for path in ("/health", "/health/ready"):
        reply = await http.get(path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unhealthy")
    readiness.heard_supervisor()
    for path in ("/health", "/health/ready"):
        assert (await http.get(path)).status_code == 200


async def test_a_draining_service_is_healthy_but_not_ready(http: Client, readiness: Readiness) -> None:
    readiness.is_draining = True
    assert (await http.get("/health")).status_code == 200
    reply = await http.get("/health/ready")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content", [b"{}", b"not JSON", b'{"stream": true}'])
async def test_a_request_that_comes_too_late_is_told_to_come_again(
    http: Client, readiness: Readiness, path: str, content: bytes
) -> None:
    readiness.is_draining = True
    reply = await http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert (reply.status_code, reply.headers["Retry-After"]) == (503, "1")
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("server_error", "draining")


async def test_other_requests_are_answered_while_it_drains(http: Client, readiness: Readiness) -> None:
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
    http: Client, readiness: Readiness, backend: ScriptedBackend
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


MAX_BODY_BYTES = 10_000


class Overload:
    """Refuses while it is said to."""

    def __init__(self) -> None:
        self.full = True
        self.num_asked = 0

    def __call__(self) -> CapacityError | None:
        self.num_asked += 1
        return CapacityError("predicted queue delay: 9 s, limit 2 s; retry in 7 s", 7.0) if self.full else None


@pytest.fixture
def overload() -> Overload:
    return Overload()


@pytest.fixture
def shedding(backend: ScriptedBackend, encoder: PromptEncoder, overload: Overload, readiness: Readiness) -> Any:
    return client_on(whole_app(backend, encoder, MAX_BODY_BYTES, readiness=readiness, shed=overload))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b"{}", b"not JSON", b"", b" " * 2 * MAX_BODY_BYTES])
async def test_a_full_service_refuses_whatever_the_body_holds(
    shedding: Client, overload: Overload, path: str, body: bytes
) -> None:
    reply = await shedding.post(path, content=body)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "7")
    assert reply.json()["error"]["code"] == "rate_limit_exceeded"
    assert reply.headers["x-farsight-retry-after-s"] == "7.000"
    overload.full = False
    assert (await shedding.post(path, content=body)).status_code in (400, 413, 415)


async def test_a_body_beyond_all_bounds_is_not_read_to_its_end(shedding: Client) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += MAX_BODY_BYTES
            yield b" " * MAX_BODY_BYTES

    reply = await shedding.post(PATHS[0], content=endless())
    assert (reply.status_code, reply.headers["connection"]) == (429, "close")
    assert sent <= 5 * MAX_BODY_BYTES
    assert "connection" not in (await shedding.post(PATHS[0], content=b"{}")).headers


async def test_a_service_that_is_not_full_answers_and_one_that_drains_says_so(
    shedding: Client, overload: Overload, readiness: Readiness
) -> None:
    overload.full = False
    assert (await shedding.post(PATHS[0], json={"prompt": "x", "max_tokens": 2})).status_code == 200
    assert overload.num_asked == 1
    overload.full, readiness.is_draining = True, True
    assert (await shedding.post(PATHS[0], json={})).status_code == 503


async def test_looks_and_other_paths_are_not_refused(shedding: Client, overload: Overload) -> None:
    assert (await shedding.get("/v1/models")).status_code == 200
    assert (await shedding.get("/status")).status_code == 200
    assert (await shedding.post("/scale", json={})).status_code != 429
    assert (await shedding.post("/v1/nothing", json={})).status_code == 404
    assert overload.num_asked == 0


class Turns:
    """Counts the turns of the running event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self.number += 1
        self._loop.call_soon(self._turn)


async def until(done: list[int], count: int) -> None:
    while len(done) < count:  # noqa: ASYNC110 - turns are what is counted
        await asyncio.sleep(0)


async def test_no_more_than_its_number_begins_in_a_turn_and_all_in_order() -> None:
    turns, pace = Turns(), LoopPace(4)
    began: list[int] = []
    order: list[int] = []

    async def work(index: int) -> None:
        await pace.turn()
        began.append(turns.number)
        order.append(index)

    tasks = [asyncio.create_task(work(index)) for index in range(101)]
    await asyncio.gather(*tasks)
    assert order == list(range(101))
    assert max(began.count(turn) for turn in set(began)) <= 4
    assert began[-1] - began[0] <= 101 // 4 + 1  # and no turn is wasted
    assert len(pace) == 0


async def test_work_that_comes_while_there_is_room_begins_at_once() -> None:
    pace = LoopPace(2)
    begun: list[int] = []
    for index in range(3):
        pace.submit(lambda index=index: begun.append(index))  # type: ignore[misc]
    assert begun == [0, 1]
    assert len(pace) == 1
    await until(begun, 3)


async def test_heavy_work_takes_the_room_of_the_turns_behind_it() -> None:
    turns, pace = Turns(), LoopPace(4)
    began: list[int] = []
    pace.submit(lambda: began.append(turns.number), 40)
    pace.submit(lambda: began.append(turns.number))
    await until(began, 2)
    assert 9 <= began[1] - began[0] <= 11


async def test_a_caller_that_is_gone_takes_no_room() -> None:
    turns, pace = Turns(), LoopPace(1)
    began: list[int] = []

    async def work() -> None:
        await pace.turn()
        began.append(turns.number)

    await pace.turn(20)
    gone = [asyncio.create_task(pace.turn(1000)) for _ in range(50)]
    last = asyncio.create_task(work())
    await asyncio.sleep(0)
    before = turns.number
    for task in gone:
        task.cancel()
    await last
    assert began[0] - before <= 25
    for task in gone:
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_it_rests_when_there_is_nothing_to_do() -> None:
    pace = LoopPace(1)
    begun: list[int] = []
    for index in range(3):
        pace.submit(lambda index=index: begun.append(index))  # type: ignore[misc]
    await until(begun, 3)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not pace._due  # no callback in the loop
    pace.submit(lambda: begun.append(3))
    assert begun == [0, 1, 2, 3]


class Weighed(LoopPace):
    """Writes down what it lets in."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[int] = []

    async def turn(self, weight: int = 1) -> None:
        self.weights.append(weight)


async def test_a_body_is_weighed_by_its_size_within_bounds_and_a_look_is_not() -> None:
    pace = Weighed()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    async def send(message: Any) -> None:
        pass

    for size in (0, 100, 10_000, 4_000_000):

        async def receive(size: int = size) -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * size}

        await BodyLimit(app, 5_000_000, pace)(
            {"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send
        )
    assert pace.weights == [1, 3, 4 * PER_TURN]
