"""Large bodies: refused before they are tokenised where that can be told, and read by other processes.

What is checked is where the work is done, not how long it takes: parsing or tokenising in this process fails the test.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from core.errors import CapacityError, InvalidValueError
from services.api import body_workers, requests
from services.api.bodies import check_num_prompts
from services.api.body_workers import BodyWorkers, read_body
from services.api.errors import ApiError, as_api_error
from services.api.fields import MAX_PROMPTS
from services.api.middleware import LARGE_BODY_BYTES
from services.api.requests import Generation
from services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import MODEL, ScriptedBackend, application, whole_app, write_model_dir

FILL = " " * LARGE_BODY_BYTES
"""White space after the JSON makes any body a large one."""

COMPLETION = {"model": MODEL, "prompt": "hello", "seed": 5, "max_tokens": 3}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "seed": 5, "n": 2}
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
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_model_dir(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def open_workers(model_dir: Any) -> AsyncIterator[BodyWorkers]:
    workers = BodyWorkers(model_dir)
    try:
        yield workers
    finally:
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
    monkeypatch.setattr("services.api.middleware.parse_object", never)


async def test_a_process_says_what_this_one_would(model_dir: Any) -> None:
    encoder = PromptEncoder(model_dir)
    model = ScriptedBackend().model
    async with open_workers(model_dir) as workers:
        for chat, body in ((False, large(COMPLETION)), (True, large(CHAT))):
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


async def test_large_requests_are_answered_as_small_ones_are(model_dir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = PromptEncoder(model_dir)
    async with open_workers(model_dir) as workers:
        app = whole_app(ScriptedBackend(), encoder, workers=workers)
        transport, headers = httpx.ASGITransport(app), {"Content-Type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
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
            refused = await client.post("/admin/scale", content=large({}))
            assert refused.status_code in (403, 413)


async def test_a_text_that_cannot_fit_is_not_tokenised(model_dir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
    app = application(backend, encoder)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for path, body in (
            ("/v1/completions", {"model": MODEL, "prompt": "a" * (limit + 1)}),
            ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "a" * (limit + 1)}]}),
        ):
            reply = await client.post(path, json=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["code"] == "context_length_exceeded"
            assert "characters, which are" in reply.json()["error"]["message"]
        assert not tokenised
        reply = await client.post("/v1/completions", json={"model": MODEL, "prompt": "a" * limit})
        assert (reply.status_code, len(tokenised)) == (400, 1)


async def test_a_process_that_dies_costs_its_own_body_alone(model_dir: Any) -> None:
    model = ScriptedBackend().model
    async with open_workers(model_dir) as workers:
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


async def test_what_waits_is_bounded_and_a_caller_may_leave(model_dir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedBackend().model
    body = large(COMPLETION)
    monkeypatch.setattr(body_workers, "MAX_WAITING_BYTES", 3 * len(body))
    async with open_workers(model_dir) as workers:
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
    model_dir: Any, monkeypatch: pytest.MonkeyPatch, limit_s: float, status: int, code: str
) -> None:
    """It is the body's fault only if it took the processor time; else the machine was busy."""
    monkeypatch.setattr(body_workers, "READ_S", 0.0)
    monkeypatch.setattr(body_workers, "READ_CPU_S", limit_s)
    async with open_workers(model_dir) as workers:
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
async def test_too_many_prompts_start_no_process(model_dir: Any, prompts: list[Any]) -> None:
    body = {"metadata": {"a": ["b"] * 100}, "prompt": prompts}
    async with open_workers(model_dir) as workers:
        with pytest.raises(InvalidValueError, match=f"prompt: .*at most {MAX_PROMPTS} prompts"):
            await workers.read(json.dumps(body).encode(), chat=False, model=ScriptedBackend().model)
        assert not workers._free and not workers._num_bytes
