"""Batches of clients: run by whichever replica is there, each line answered once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from core.errors import CapacityError
from core.kept import PartsQuery
from core.request import FLEX
from services.api.batches.records import WINDOW_S
from services.api.batches.running import LEASE_S, BatchRunner
from tests.unit.services.api.api_support import HELLO, ScriptedBackend
from tests.unit.services.api.batches.conftest import BatchService, Serve
from tests.unit.services.api.batches.kept_support import SqliteShelf
from tests.unit.services.api.batches.test_files import library


def lines(count: int, **changes: Any) -> bytes:
    """So many requests; ``changes`` of the body of each."""
    each = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": [5, i % 200], **changes}}
        for i in range(count)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in each)


@asynccontextmanager
async def running(runner: BatchRunner) -> Any:
    task = asyncio.create_task(runner.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def begin(service: BatchService, data: bytes, key: str = "none", **fields: Any) -> str:
    client = library(service, key)
    made = await client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = await client.batches.create(
        input_file_id=made.id, endpoint="/v1/completions", completion_window="24h", **fields
    )
    assert batch.status == "validating"
    return batch.id


async def until(service: BatchService, batch_id: str, *statuses: str, key: str = "none") -> openai.types.Batch:
    client = library(service, key)
    while (batch := await client.batches.retrieve(batch_id)).status not in statuses:
        assert batch.status not in ("failed", "completed", "expired", "cancelled"), batch
        await asyncio.sleep(0.01)
    return batch


async def output(service: BatchService, file_id: str | None, key: str = "none") -> list[dict[str, Any]]:
    assert file_id is not None
    content = (await library(service, key).files.content(file_id)).text
    return [json.loads(line) for line in content.splitlines()]


async def test_the_openai_library(serve: Serve) -> None:
    service = serve()
    data = lines(40) + lines(1, prompt=[]).replace(b'"c0"', b'"bad"')
    batch_id = await begin(service, data, metadata={"for": "a test"})
    async with running(service.runner()):
        batch = await until(service, batch_id, "completed")
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (41, 40, 1)
    assert batch.metadata == {"for": "a test"}
    found = await output(service, batch.output_file_id)
    assert [line["custom_id"] for line in found] == [f"c{i}" for i in range(40)]
    assert {line["response"]["body"]["choices"][0]["text"] for line in found} == {"Hello!"}
    (bad,) = await output(service, batch.error_file_id)
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
    assert set(service.backend.priorities) == {FLEX}
    client = library(service)
    assert [each.id async for each in await client.batches.list()] == [batch_id]
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch_id)
    assert (await service.client.delete(f"/v1/batches/{batch_id}")).json()["deleted"]
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve(batch_id)


async def test_another_replica_goes_on_and_no_line_is_answered_twice(serve: Serve, shelf: SqliteShelf) -> None:
    """The first replica is cut off in the midst, as by ``kill -9``: it gives nothing back."""
    service = serve(batch_in_flight=4)
    batch_id = await begin(service, lines(60))
    gate = asyncio.Event()
    slow = ScriptedBackend()
    first = service.runner("first", _stopping(slow, after=37, gate=gate))
    async with running(first):
        await shelf.have_lines(32)
    kept = (await shelf.read_parts(PartsQuery("lines", batch_id, 0, 0, only_indices=True))).parts
    assert len(kept) < 60
    service.clock.now += LEASE_S + 1
    second = ScriptedBackend()
    async with running(service.runner("second", second)):
        batch = await until(service, batch_id, "completed")
    assert len(second.calls) == 60 - len(kept), "lines with a result run no more"
    found = await output(service, batch.output_file_id)
    assert [line["custom_id"] for line in found] == [f"c{i}" for i in range(60)]


async def test_two_replicas_share_no_batch(serve: Serve) -> None:
    service = serve()
    batch_id = await begin(service, lines(30))
    one, two = ScriptedBackend(), ScriptedBackend()
    async with running(service.runner("one", one)), running(service.runner("two", two)):
        await until(service, batch_id, "completed")
    assert sorted((len(one.calls), len(two.calls))) == [0, 30]


async def test_a_refused_line_is_sent_again(serve: Serve) -> None:
    seen: set[tuple[int, ...]] = set()

    def script(prompt: tuple[int, ...]) -> Any:
        if prompt in seen:
            return HELLO
        seen.add(prompt)
        return [CapacityError("full", retry_after_s=0.01)]

    service = serve(backend=ScriptedBackend(script))
    batch_id = await begin(service, lines(3))
    async with running(service.runner()):
        batch = await until(service, batch_id, "completed")
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 3


async def test_lines_wait_while_others_do(serve: Serve) -> None:
    service = serve()
    service.free_places[0] = 0
    batch_id = await begin(service, lines(5))
    async with running(service.runner()):
        await until(service, batch_id, "in_progress")
        await asyncio.sleep(0.1)
        assert not service.backend.calls
        service.free_places[0] = 1
        await until(service, batch_id, "completed")


async def test_a_cancelled_batch_keeps_what_it_has(serve: Serve, shelf: SqliteShelf) -> None:
    gate = asyncio.Event()
    backend = _stopping(ScriptedBackend(), after=5, gate=gate)
    service = serve(backend=backend, batch_in_flight=1)
    batch_id = await begin(service, lines(20))
    async with running(service.runner()):
        await shelf.have_lines(5)
        assert (await library(service).batches.cancel(batch_id)).status == "cancelling"
        batch = await until(service, batch_id, "cancelled")
    assert len(await output(service, batch.output_file_id)) == 5
    assert batch.error_file_id is None


async def test_a_batch_whose_time_is_over_says_so_of_each_line(serve: Serve) -> None:
    service = serve(backend=_stopping(ScriptedBackend(), after=0, gate=asyncio.Event()), batch_in_flight=2)
    batch_id = await begin(service, lines(4))
    async with running(service.runner()):
        await until(service, batch_id, "in_progress")
        service.clock.now += WINDOW_S
        batch = await until(service, batch_id, "expired")
    found = await output(service, batch.error_file_id)
    assert [line["error"]["code"] for line in found] == ["batch_expired"] * 4


_GOOD = json.loads(lines(1))


@pytest.mark.parametrize(
    ("data", "code", "line"),
    [
        (b"not json\n", "invalid_line", 1),
        (lines(2) + b"[]\n", "invalid_line", 3),
        (lines(1) + lines(1), "invalid_line", 2),
        (b"\n \n", "empty_file", None),
        (b"\xff\xfe\n", "invalid_line", 1),
        (b"[" * 100_000 + b"\n", "invalid_line", 1),
        (b'{"custom_id": "' + b"x" * 100_000 + b'"}\n', "invalid_line", 1),
        (json.dumps({**_GOOD, "url": "/v1/chat/completions"}).encode(), "mismatched_url", 1),
        (json.dumps({**_GOOD, "url": "/admin/scale"}).encode(), "invalid_line", 1),
        (json.dumps({**_GOOD, "method": "DELETE"}).encode(), "invalid_line", 1),
        (json.dumps({**_GOOD, "body": {"stream": True}}).encode(), "invalid_line", 1),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"a": NaN}}', "invalid_line", 1),
        (lines(11), "too_many_lines", 11),
    ],
)
async def test_a_bad_input_fails_the_batch_and_names_the_line(
    data: bytes, code: str, line: int | None, serve: Serve
) -> None:
    service = serve(max_batch_lines=10)
    batch_id = await begin(service, data)
    async with running(service.runner()):
        batch = await until(service, batch_id, "failed")
    assert batch.errors is not None and batch.errors.data
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, line)
    assert not service.backend.calls


async def test_a_batch_is_its_tenants(serve: Serve) -> None:
    service = serve(("one", "two"))
    batch_id = await begin(service, lines(3), service.keys["one"])
    two = library(service, service.keys["two"])
    for call in (two.batches.retrieve, two.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            await call(batch_id)
    assert (await two.batches.list()).data == []
    assert (await service.client.delete(f"/v1/batches/{batch_id}", headers=service.bearer("two"))).status_code == 404
    async with running(service.runner()):
        batch = await until(service, batch_id, "completed", key=service.keys["one"])
    assert service.backend.keys == ["one"] * 3, "its requests count for its tenant"
    with pytest.raises(openai.NotFoundError):
        await two.files.content(str(batch.output_file_id))
    assert len(await output(service, batch.output_file_id, service.keys["one"])) == 3


async def test_a_wrong_request_for_a_batch(serve: Serve) -> None:
    service = serve()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"unknown": 1}, "unknown"),
        ({"input_file_id": 5}, "input_file_id"),
    ]
    for change, field in cases:
        body = {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h", **change}
        reply = await service.client.post("/v1/batches", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text
    for query in ("limit=0", "limit=101", "limit=x"):
        assert (await service.client.get(f"/v1/batches?{query}")).status_code == 400


def _stopping(backend: ScriptedBackend, after: int, gate: asyncio.Event) -> ScriptedBackend:
    """Answers so many requests; the others wait for the gate."""
    inner: Callable[..., Any] = backend.stream
    count = 0

    async def stream(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count > after:
            await gate.wait()
        async for delta in inner(*args):
            yield delta

    backend.stream = stream  # type: ignore[method-assign, assignment]
    return backend
