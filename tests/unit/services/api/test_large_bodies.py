"""Large bodies: refused before they are tokenised where that can be told, and read by other processes.

What is checked is where the work is done, not how long it takes: parsing or tokenising in this process fails the test.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from farsight.core.errors import CapacityError, InvalidValueError
from farsight.services.api import body_workers, requests
from farsight.services.api.bodies import LARGE_BODY_BYTES
from farsight.services.api.body_workers import BodyWorkers, check_num_prompts, read_body
from farsight.services.api.errors import ApiError, as_api_error
from farsight.services.api.fields import MAX_PROMPTS
from farsight.services.api.generation import Generation
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import (
    MODEL,
    ScriptedBackend,
    Step,
    application,
    client_on,
    delta,
    refusal,
    until,
    whole_app,
    write_model_dir,
)

FILL = " " * LARGE_BODY_BYTES
"""White space after the JSON makes any body a large one."""

COMPLETION = {"model": MODEL, "prompt": "hello", "seed": 5, "max_tokens": 3}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "seed": 5, "n": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BAD: dict[str, bytes] = {
    "not JSON": b"{" + FILL.encode(),
    "nested": b"[" * LARGE_BODY_BYTES,
    "a list": b"[" + b"0," * LARGE_BODY_BYTES + b"0]",
    "unknown field": json.dumps({**COMPLETION, "prompts": FILL}).encode(),
    "many fields": json.dumps({**COMPLETION, **{f"x{i}": 0 for i in range(LARGE_BODY_BYTES // 8)}}).encode(),
    "wrong type": json.dumps({**COMPLETION, "seed": FILL}).encode(),
    "wrong model": json.dumps({**COMPLETION, "model": FILL}).encode(),
    "too many ids": json.dumps({**COMPLETION, "prompt": [1] * LARGE_BODY_BYTES}).encode(),
    "too long a text": json.dumps({**COMPLETION, "prompt": "a" * LARGE_BODY_BYTES}).encode(),
    "half a character": b'{"model": "\\ud800"}' + FILL.encode(),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def workers(model_dir: Path) -> AsyncIterator[BodyWorkers]:
    workers = BodyWorkers(model_dir)
    yield workers
    workers.close()


def large(body: dict[str, Any]) -> bytes:
    return (json.dumps(body) + FILL).encode()


def fields(error: Exception) -> tuple[Any, ...]:
    found = as_api_error(error)
    return found.message, found.status, found.kind, found.param, found.code, found.headers


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process does none of the work."""

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("done in the process that serves streams")

    monkeypatch.setattr(body_workers, "parse_object", never)
    monkeypatch.setattr(requests, "make_generation", never)
    monkeypatch.setattr("farsight.services.api.bodies.parse_object", never)


async def test_a_process_says_what_this_one_would(encoder: PromptEncoder, workers: BodyWorkers) -> None:
    model = ScriptedBackend().model
    for chat, body in ((False, large(COMPLETION)), (True, large(CHAT)), (True, large({**CHAT, "tools": [TOOL]}))):
        found = await workers.read(body, chat=chat, model=model)
        assert found == read_body(body, chat=chat, model=model, encoder=encoder)
    for name, body in BAD.items():
        with pytest.raises(Exception) as here:
            read_body(body, chat=False, model=model, encoder=encoder)
        with pytest.raises(ApiError) as there:
            await workers.read(body, chat=False, model=model)
        assert fields(there.value) == fields(here.value), name
        assert there.value.status in (400, 404), name
        assert len(there.value.message) < 2000, name


async def test_large_requests_are_answered_as_small_ones_are(
    encoder: PromptEncoder, workers: BodyWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_on(whole_app(ScriptedBackend(), encoder, workers=workers), **{"Content-Type": "application/json"})
    paths = (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT))
    small = [await client.post(path, json=body) for path, body in paths]
    streamed = await client.post("/v1/completions", json={**COMPLETION, "stream": True})
    forbid(monkeypatch)
    for (path, body), expected in zip(paths, small, strict=True):
        reply = await client.post(path, content=large(body))
        assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
        assert {**reply.json(), "id": "", "created": 0} == {**expected.json(), "id": "", "created": 0}
    reply = await client.post("/v1/completions", content=large({**COMPLETION, "stream": True}))
    assert reply.headers["content-type"] == streamed.headers["content-type"]
    assert reply.text.count("data: ") == streamed.text.count("data: ") > 2
    refused = await client.post("/v1/completions", content=BAD["unknown field"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_parameter")
    assert (await client.post("/admin/scale", content=large({}))).status_code in (403, 413)


async def test_a_text_that_cannot_fit_is_not_tokenised(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = PromptEncoder(model_dir)
    longest = encoder._capacity
    assert longest is not None
    backend = ScriptedBackend()
    limit = longest.chars_per_token * (backend.model.max_model_len - 1)

    tokenised: list[int] = []
    encode = encoder._encoder.encode

    def counted(text: str, *args: Any, **kwargs: Any) -> Any:
        tokenised.append(len(text))
        return encode(text, *args, **kwargs)

    monkeypatch.setattr(encoder._encoder, "encode", counted)
    client = client_on(application(backend, encoder))
    for path, fields in (
        ("/v1/completions", {"prompt": "a" * (limit + 1)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * (limit + 1)}]}),
    ):
        error = await refusal(client, path, **fields)
        assert error["code"] == "context_length_exceeded" and "characters, which are" in error["message"]
    assert not tokenised
    await refusal(client, "/v1/completions", prompt="a" * limit)
    assert len(tokenised) == 1


async def test_a_process_that_dies_costs_its_own_body_alone(workers: BodyWorkers) -> None:
    model = ScriptedBackend().model
    await workers.read(large(COMPLETION), chat=False, model=model)
    (worker,) = workers._free
    worker._process.kill()
    worker._process.wait()
    with pytest.raises(ApiError) as error:
        await workers.read(large(COMPLETION), chat=False, model=model)
    assert (error.value.status, error.value.headers) == (503, {"Retry-After": "1"})
    found = await workers.read(large(COMPLETION), chat=False, model=model)
    assert isinstance(found, Generation)
    assert workers._num_bytes == 0


async def test_what_waits_is_bounded_and_a_caller_may_leave(
    workers: BodyWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ScriptedBackend().model
    body = large(COMPLETION)
    monkeypatch.setattr(body_workers, "MAX_WAITING_BYTES", 3 * len(body))
    readers = [asyncio.create_task(workers.read(body, chat=False, model=model)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(CapacityError, match="large request bodies"):
        await workers.read(body, chat=False, model=model)
    readers[0].cancel()  # is being read
    readers[2].cancel()  # waits for its turn
    done = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(each) for each in done] == [asyncio.CancelledError, Generation, asyncio.CancelledError]
    await asyncio.gather(*workers._reading)  # what its caller has left is still read
    again = await asyncio.gather(*(workers.read(body, chat=False, model=model) for _ in range(3)))
    assert len(again) == 3
    assert workers._num_bytes == 0
    assert len(workers._free) == body_workers.NUM_PROCESSES


@pytest.mark.parametrize(("limit_s", "status", "code"), [(30.0, 503, "unavailable"), (0.0, 400, "too_costly")])
async def test_a_body_that_takes_too_long_ends_its_process(
    workers: BodyWorkers, monkeypatch: pytest.MonkeyPatch, limit_s: float, status: int, code: str
) -> None:
    """It is the body's fault only if it took the processor time; else the machine was busy."""
    monkeypatch.setattr(body_workers, "READ_S", 0.0)
    monkeypatch.setattr(body_workers, "READ_CPU_S", limit_s)
    with pytest.raises(ApiError) as error:
        await workers.read(large(COMPLETION), chat=False, model=ScriptedBackend().model)
    assert (error.value.status, error.value.code) == (status, code)
    assert not workers._free


MANY = MAX_PROMPTS + 1
FOR_THE_PARSER: list[dict[str, Any]] = [
    {"prompt": ["a"] * MAX_PROMPTS},
    {"prompt": [[1, 2]] * MAX_PROMPTS},
    {"prompt": [1] * 10_000},
    {"prompt": ", ".join(["a"] * MANY)},
    {"prompt": [", ".join(['"'] * MANY)]},
    {"metadata": {"prompt": ["a"] * MANY}},
    {"user": json.dumps({"prompt": ["a"] * MANY}), "stop": ["prompt"]},
    {"prompt": {"a": ["b"] * MANY}},
    {"prompt": None},
]


@pytest.mark.parametrize("body", FOR_THE_PARSER)
def test_what_may_be_right_is_left_to_the_parser(body: dict[str, Any]) -> None:
    check_num_prompts(json.dumps(body).encode())
    check_num_prompts(json.dumps(body).encode()[:-5])


@pytest.mark.parametrize("prompts", [["a"] * 100_000, ['"[\\'] * MANY, [[1, -2]] * 100_000, [[]] * MANY, ["é"] * MANY])
async def test_too_many_prompts_start_no_process(workers: BodyWorkers, prompts: list[Any]) -> None:
    body = {"metadata": {"a": ["b"] * 100}, "prompt": prompts}
    with pytest.raises(InvalidValueError, match=f"prompt: .*at most {MAX_PROMPTS} prompts"):
        await workers.read(json.dumps(body).encode(), chat=False, model=ScriptedBackend().model)
    assert not workers._free and not workers._num_bytes


SILENT: list[Step] = [1e6]
TALKING: list[Step] = [delta("x"), 1e6]
BUSY: list[Step] = [*[delta("x" * 1000)] * 100_000, delta("", "stop")]


@asynccontextmanager
async def _serve(backend: ScriptedBackend, encoder: PromptEncoder) -> AsyncGenerator[int, None]:
    config = uvicorn.Config(whole_app(backend, encoder), host="127.0.0.1", port=0, log_level="warning", ws="none")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def _send(port: int, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [SILENT, TALKING])
@pytest.mark.parametrize(
    ("path", "prompt", "num_streams"),
    [
        ("/v1/completions", {"prompt": "hello"}, 1),
        ("/v1/completions", {"prompt": ["hello"] * 5}, 5),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, 1),
    ],
)
async def test_leaving_closes_every_stream(
    encoder: PromptEncoder, path: str, prompt: dict[str, Any], num_streams: int, script: list[Step], stream: bool
) -> None:
    backend = ScriptedBackend(script)
    async with _serve(backend, encoder) as port:
        reader, writer = await _send(port, path, {"model": MODEL, "stream": stream, **prompt})
        await until(lambda: backend.num_opened == num_streams)
        if stream and script is TALKING:
            assert b"200 OK" in await reader.readuntil(b"data: ")
        assert backend.num_closed == 0
        writer.close()
        await until(lambda: backend.num_closed == num_streams)
    assert backend.num_completed == 0


async def test_leaving_a_busy_stream_unread(encoder: PromptEncoder) -> None:
    """A client that does not read stops the stream by flow control, and ends it by leaving."""
    backend = ScriptedBackend(BUSY)
    async with _serve(backend, encoder) as port:
        _, writer = await _send(port, "/v1/completions", {"model": MODEL, "stream": True, "prompt": "hello"})
        await until(lambda: backend.num_opened == 1)
        await asyncio.sleep(0.1)
        assert backend.num_closed == 0
        writer.transport.abort()
        await until(lambda: backend.num_closed == 1)
    assert backend.num_completed == 0


async def test_body_over_the_limit_is_answered_while_it_is_sent(encoder: PromptEncoder) -> None:
    async with _serve(ScriptedBackend(), encoder) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/v1/completions"
        response = await client.post(url, content=b"x" * 10_000_000, headers={"content-type": "application/json"})
        assert response.status_code == 413
        good = await client.post(url, json={"model": MODEL, "prompt": "hello"})
        assert good.status_code == 200
