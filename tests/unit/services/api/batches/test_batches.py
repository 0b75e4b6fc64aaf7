"""Batches of clients: run by whichever replica is there, each line answered once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from farsight.core.errors import CapacityError
from farsight.core.forecast import QUANTILES, Forecast
from farsight.core.kept import PartsQuery
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import FLEX, Request
from farsight.services.api.batches.lines import BatchLine
from farsight.services.api.batches.records import WINDOW_S
from farsight.services.api.batches.running import LEASE_S, BatchRunner
from farsight.services.api.batches.sender import WINDOW_LINES, in_order, longest_first
from farsight.services.api.generation import PromptText
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import HELLO, ScriptedBackend
from tests.unit.services.api.batches.conftest import BatchService, Serve, running
from tests.unit.services.api.batches.kept_support import SqliteObjects
from tests.unit.services.api.batches.test_files import library
from tests.unit.services.api.pictures.test_pictures import FILE, PARTS, chat, image, seeing_backend, seeing_dir, text


def line_of(name: str, body: dict[str, Any], url: str = "/v1/completions") -> bytes:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}).encode() + b"\n"


def lines(count: int, **changes: Any) -> bytes:
    """So many requests; ``changes`` of the body of each."""
    return b"".join(line_of(f"c{i}", {"prompt": [5, i % 200], **changes}) for i in range(count))


async def begin(service: BatchService, data: bytes, name: str = "", **fields: Any) -> str:
    client = library(service, name)
    made = await client.files.create(file=("in.jsonl", data), purpose="batch")
    endpoint = fields.pop("endpoint", "/v1/completions")
    batch = await client.batches.create(input_file_id=made.id, endpoint=endpoint, completion_window="24h", **fields)
    assert batch.status == "validating"
    return batch.id


async def run_to(status: str, service: BatchService, batch_id: str, runner: BatchRunner | None = None) -> Any:
    """The batch when it has come to this status."""
    async with running(runner or service.runner()):
        return await until(service, batch_id, status)


async def until(service: BatchService, batch_id: str, *statuses: str, name: str = "") -> openai.types.Batch:
    client = library(service, name)
    while (batch := await client.batches.retrieve(batch_id)).status not in statuses:
        assert batch.status not in ("failed", "completed", "expired", "cancelled"), batch
        await asyncio.sleep(0.01)
    return batch


async def output(service: BatchService, file_id: str | None, name: str = "") -> list[dict[str, Any]]:
    assert file_id is not None
    content = (await library(service, name).files.content(file_id)).text
    return [json.loads(line) for line in content.splitlines()]


async def test_the_openai_library(serve: Serve, store: SqliteObjects) -> None:
    service = serve()
    data = lines(40) + lines(1, prompt=[]).replace(b'"c0"', b'"bad"')
    batch_id = await begin(service, data, metadata={"for": "a test"})
    batch = await run_to("completed", service, batch_id)
    assert store.num_reads < 10, "no more than a few, however many lines there are"
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


async def test_another_replica_goes_on_and_no_line_is_answered_twice(serve: Serve, store: SqliteObjects) -> None:
    """The first replica is cut off in the midst, as by ``kill -9``: it gives nothing back."""
    service = serve(batch_in_flight=4)
    batch_id = await begin(service, lines(60))
    async with running(service.runner("first", Stopping(after=37))):
        await store.have_lines(32)
    kept = (await store.read_parts(PartsQuery("lines", batch_id, 0, 0, only_indices=True))).parts
    assert len(kept) < 60
    service.clock.now += LEASE_S + 1
    second = ScriptedBackend()
    batch = await run_to("completed", service, batch_id, service.runner("second", second))
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


async def test_a_batch_goes_on_when_the_service_answers_again(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Any] = []
    full = CapacityError("full", retry_after_s=0.01)
    service = serve(backend=ScriptedBackend(lambda prompt: answers or [full]))
    batch_id = await begin(service, lines(3))
    async with running(service.runner(give_up_s=0.05)):
        while True:
            await asyncio.sleep(0.01)
            if f"{batch_id} waits for another try: the service answered no request" in caplog.text:
                break
        answers += HELLO
        batch = await until(service, batch_id, "completed")
    assert len(await output(service, batch.output_file_id)) == 3


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


async def test_a_cancelled_batch_keeps_what_it_has(serve: Serve, store: SqliteObjects) -> None:
    service = serve(backend=Stopping(after=5), batch_in_flight=1)
    batch_id = await begin(service, lines(20))
    async with running(service.runner()):
        await store.have_lines(5)
        assert (await library(service).batches.cancel(batch_id)).status == "cancelling"
        batch = await until(service, batch_id, "cancelled")
    assert len(await output(service, batch.output_file_id)) == 5
    assert batch.error_file_id is None


async def test_a_batch_whose_time_is_over_says_so_of_each_line(serve: Serve) -> None:
    service = serve(backend=Stopping(after=0), batch_in_flight=2)
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
        (b'{"custom_id": "' + b"x" * 100_000 + b'"}\n', "invalid_line", 1),
        (json.dumps({**_GOOD, "url": "/v1/chat/completions"}).encode(), "mismatched_url", 1),
        (lines(11), "too_many_lines", 11),
    ],
)
async def test_a_bad_input_fails_the_batch_and_names_the_line(
    data: bytes, code: str, line: int | None, serve: Serve
) -> None:
    service = serve(max_batch_lines=10)
    batch_id = await begin(service, data)
    batch = await run_to("failed", service, batch_id)
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, line)
    assert not service.backend.calls


async def test_a_batch_is_its_tenants(serve: Serve) -> None:
    service = serve(("one", "two"))
    batch_id = await begin(service, lines(3), "one")
    two = library(service, "two")
    for call in (two.batches.retrieve, two.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            await call(batch_id)
    assert (await two.batches.list()).data == []
    assert (await service.client.delete(f"/v1/batches/{batch_id}", headers=service.bearer("two"))).status_code == 404
    async with running(service.runner()):
        batch = await until(service, batch_id, "completed", name="one")
    assert service.backend.keys == ["one"] * 3, "its requests count for its tenant"
    with pytest.raises(openai.NotFoundError):
        await two.files.content(str(batch.output_file_id))
    assert len(await output(service, batch.output_file_id, "one")) == 3


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


class Stopping(ScriptedBackend):
    """Answers so many requests; the others wait for ever."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after

    async def stream(
        self, request: Request, text: PromptText | None = None, key: str = ""
    ) -> AsyncGenerator[TokenDelta, None]:
        self._after -= 1
        if self._after < 0:
            await asyncio.Event().wait()
        async for delta in super().stream(request, text, key):
            yield delta


async def test_lines_with_pictures_run_as_chats(serve: Serve, tmp_path: Path) -> None:
    """A wrong one fails alone."""
    folder = seeing_dir(tmp_path / "seeing", PARTS)
    backend = seeing_backend(folder)
    service = serve(backend=backend, encoder=PromptEncoder(folder))
    bodies = [chat(text("see"), image()), chat(image(), image(b"other")), chat(text("no picture"))]
    bodies.append(chat({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}))
    url = "/v1/chat/completions"
    data = b"".join(line_of(f"c{i}", body, url) for i, body in enumerate(bodies))
    done = await run_to("completed", service, await begin(service, data, endpoint=url))
    assert [line["custom_id"] for line in await output(service, done.output_file_id)] == ["c0", "c1", "c2"]
    (bad,) = await output(service, done.error_file_id)
    assert bad["custom_id"] == "c3" and bad["response"]["status_code"] == 400
    assert sorted(file.data for file, _ in backend.seen) == sorted([FILE, FILE, b"other"])


def forecast(mean: float, rank: float | None = None, version: int = 1) -> Forecast:
    return Forecast(mean, (mean,) * len(QUANTILES), 5, "forest", version, rank)


def numbered(count: int) -> list[BatchLine]:
    return [BatchLine(i, f"c{i}", "/v1/completions", b"{}") for i in range(count)]


def test_the_longest_come_first_and_equal_ones_keep_their_order() -> None:
    assert longest_first([forecast(5), forecast(9), forecast(5), forecast(7)]) == [1, 3, 0, 2]


def test_lines_without_a_forecast_come_last() -> None:
    assert longest_first([None, forecast(1), None, forecast(2)]) == [3, 1, 0, 2]
    assert longest_first([None, None]) == [0, 1]


def test_ranks_count_where_all_are_of_one_version() -> None:
    assert longest_first([forecast(5, rank=0.9), forecast(9, rank=0.1)]) == [0, 1]
    assert longest_first([forecast(5, rank=0.9), forecast(9, rank=0.1, version=2)]) == [1, 0], "else means"
    assert longest_first([forecast(5, rank=0.9), forecast(9)]) == [1, 0]


async def test_each_window_is_put_in_order_by_itself() -> None:
    asked: list[int] = []

    async def forecast_lines(lines: Sequence[BatchLine]) -> list[Forecast | None]:
        asked.append(len(lines))
        return [forecast(line.number) for line in lines]

    taken = [line.number async for line in in_order(numbered(WINDOW_LINES + 3), forecast_lines)]
    assert asked == [WINDOW_LINES, 3]
    assert taken == [*reversed(range(WINDOW_LINES)), WINDOW_LINES + 2, WINDOW_LINES + 1, WINDOW_LINES]


async def test_without_forecasts_lines_keep_their_order() -> None:
    assert [line.number async for line in in_order(numbered(3), None)] == [0, 1, 2]
