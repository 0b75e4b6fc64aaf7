"""Lines of a batch, for the endpoints and the command: read and checked, then run over the real application, and over
small ones where answers must be scripted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from farsight.core.errors import CapacityError, FarsightError, InvalidValueError
from farsight.core.forecast import QUANTILES, Forecast
from farsight.services.api.batches.lines import Batch, BatchLine, LineResult, answered, read_batch, read_result, unsent
from farsight.services.api.batches.sender import GROUP_S, RetryPolicy, ServiceStalled, run_lines
from tests.unit.services.api.api_support import ScriptedBackend
from tests.unit.services.batch.batch_support import CHAT, answering, echo, numbered, request, served, write_batch

FAST = RetryPolicy(first_delay_s=0.001, max_delay_s=0.01)
Answer = tuple[int, dict[str, str], Any]


async def _ok(number: int) -> Answer:
    return 200, {}, {}


async def _run(app: Any, batch: Batch, concurrency: int = 8, **options: Any) -> list[dict[str, Any]]:
    """The results in the order of the lines, of which each has one."""
    kept: list[LineResult] = []

    async def keep(results: Sequence[LineResult]) -> None:
        kept.extend(results)

    await run_lines(app, batch.lines, keep, asyncio.Semaphore(concurrency), **{"retry": FAST, **options})
    found = {each.custom_id: json.loads(each.data) for each in kept}
    assert len(found) == len(kept)
    return [found[line.custom_id] for line in batch.lines]


def test_lines_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    first = json.dumps(request("a"))
    second = json.dumps(request("b", CHAT, stream=False, user="x\u2028y\x85z"), ensure_ascii=False)
    path.write_text(f"\n{first}\r\n  \n{second}", encoding="utf-8")
    batch = read_batch(path)
    assert [(line.number, line.custom_id, line.url) for line in batch.lines] == [
        (2, "a", "/v1/completions"),
        (4, "b", "/v1/chat/completions"),
    ]
    body = request("b", CHAT, stream=False, user="x\u2028y\x85z")["body"]
    assert json.loads(batch.lines[1].body) == body, "a line separator inside a string ends no line"


def test_sha256_is_of_the_bytes(tmp_path: Path) -> None:
    one = read_batch(write_batch(tmp_path / "a", [request("a")]))
    same = read_batch(write_batch(tmp_path / "b", [request("a")]))
    other = read_batch(write_batch(tmp_path / "c", [request("b")]))
    assert one.sha256 == same.sha256 != other.sha256


SERVED = "'/v1/chat/completions' or '/v1/completions' or '/v1/embeddings'"


@pytest.mark.parametrize(
    ("change", "field", "found", "expected"),
    [
        ({"custom_id": None}, "custom_id", "None", "a non-empty string"),
        ({"custom_id": 7}, "custom_id", "7", "a non-empty string"),
        ({"custom_id": ""}, "custom_id", "''", "a non-empty string"),
        ({"custom_id": "first"}, "custom_id", "'first'", "one that no other line has; line 1 has it"),
        ({"method": "GET"}, "method", "'GET'", "'POST'"),
        ({"url": "/v1/models"}, "url", "'/v1/models'", SERVED),
        ({"url": ["x"]}, "url", "['x']", SERVED),
        ({"body": None}, "body", "None", "an object, the request as it would be sent to url"),
        ({"body": {"stream": True}}, "body.stream", "True", "false or no such field; a batch keeps whole answers"),
    ],
)
def test_wrong_field_is_named(tmp_path: Path, change: dict[str, Any], field: str, found: str, expected: str) -> None:
    path = write_batch(tmp_path / "in.jsonl", [request("first"), {**request("second"), **change}])
    with pytest.raises(InvalidValueError) as refused:
        read_batch(path)
    assert str(refused.value) == f"{path} line 2, {field}: got {found}, expected {expected}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"custom_id": ', "a JSON object (Expecting value at column 15)"),
        (b"[1]", "a JSON object"),
        (b"null", "a JSON object"),
        (b'{"a": NaN}', "a JSON object (NaN is not JSON)"),
        (b'{"a": "\xff"}', "UTF-8; byte 7 is not"),
        (b'{"a": ' + b"1" * 5000 + b"}", "a JSON object (Exceeds the limit"),
        (b'{"a": ' + b"[" * 200_000, "a JSON object nested less deeply"),
    ],
)
def test_line_that_is_no_json_object(tmp_path: Path, line: bytes, expected: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n\n" + line + b"\n")
    with pytest.raises(InvalidValueError) as refused:
        read_batch(path)
    assert str(refused.value).startswith(f"{path} line 3: got ")
    assert f"expected {expected}" in str(refused.value)


@pytest.mark.parametrize("data", [b"", b"\n \n"])
def test_empty_file_or_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "in.jsonl"
    with pytest.raises(InvalidValueError, match="expected a readable file \\(No such file or directory\\)"):
        read_batch(path)
    path.write_bytes(data)
    with pytest.raises(InvalidValueError, match="expected a file with at least one request"):
        read_batch(path)


@pytest.mark.parametrize(
    ("line", "failed", "response", "error"),
    [
        (
            answered("a\ud800", 200, "req_9", b'{"text": "\xc3\xa9"}'),
            False,
            {"status_code": 200, "request_id": "req_9", "body": {"text": "é"}},
            None,
        ),
        (
            answered("a\ud800", 400, "req_9", b'{"error": {"code": "invalid_value"}}'),
            True,
            {"status_code": 400, "request_id": "req_9", "body": {"error": {"code": "invalid_value"}}},
            None,
        ),
        (unsent("a\ud800", "some_code", "Why."), True, None, {"code": "some_code", "message": "Why."}),
    ],
    ids=["answer", "refusal", "no answer"],
)
def test_an_output_line(line: LineResult, failed: bool, response: object, error: object) -> None:
    fields = json.loads(line.data)
    assert fields.pop("id").startswith("batch_req_")
    assert fields == {"custom_id": "a\ud800", "response": response, "error": error}
    assert line.failed == failed
    assert line.data.count(b"\n") == 1
    assert read_result(line.data) == line


def test_answer_without_an_id_gets_one_and_one_that_is_no_json_becomes_an_error() -> None:
    assert json.loads(answered("a", 200, None, b"{}").data)["response"]["request_id"].startswith("req_")
    assert json.loads(answered("a", 200, None, b"<html>").data)["error"]["code"] == "invalid_response"


@pytest.mark.parametrize("data", [b"", b"\n", b"[]\n", b"{}\n", b'{"custom_id":"a","response":null}', b"\x00\x00\n"])
def test_what_is_no_result(data: bytes) -> None:
    assert read_result(data) is None


async def test_answers_and_refusals_of_the_real_application(tmp_path: Path) -> None:
    requests = [
        request("a", CHAT),
        request("b"),
        request("c", temperature=-1),
        request("d", prompt="x" * 5_000_000),
        {**request("e"), "body": {"model": "other", "prompt": "hi"}},
    ]
    batch = read_batch(write_batch(tmp_path / "in.jsonl", requests))
    output = await _run(served(tmp_path / "model", ScriptedBackend()), batch)
    assert [line["custom_id"] for line in output] == ["a", "b", "c", "d", "e"]
    assert [line["response"]["status_code"] for line in output] == [200, 200, 400, 413, 404]
    assert all(line["error"] is None for line in output)
    assert output[0]["response"]["body"]["choices"][0]["message"]["content"] == "Hello!"
    assert output[1]["response"]["body"]["choices"][0]["text"] == "Hello!"
    assert output[2]["response"]["body"]["error"]["param"] == "temperature"


async def test_concurrency_is_bounded_and_used(tmp_path: Path) -> None:
    under_way = most = 0

    async def answer(number: int) -> Answer:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.002)
        under_way -= 1
        return await _ok(number)

    await _run(answering(answer), numbered(tmp_path / "in.jsonl", 50), concurrency=7)
    assert most == 7


async def test_the_longest_forecast_begins_first_and_each_answer_has_its_line(tmp_path: Path) -> None:
    begun: list[int] = []

    async def answer(number: int) -> Answer:
        begun.append(number)
        return 200, {"X-Request-Id": f"r-{number}"}, {"number": number}

    async def forecast_lines(lines: Sequence[BatchLine]) -> list[Forecast | None]:
        return [Forecast(float(line.number), (1.0,) * len(QUANTILES), 1, "forest", 1) for line in lines]

    batch = numbered(tmp_path / "in.jsonl", 9)
    output = await _run(answering(answer), batch, concurrency=1, forecast_lines=forecast_lines)
    assert begun == list(reversed(range(9)))
    assert [line["response"]["body"]["number"] for line in output] == list(range(9))
    assert [line["response"]["request_id"] for line in output] == [f"r-{i}" for i in range(9)]


async def test_refused_requests_are_tried_again(tmp_path: Path) -> None:
    tries: Counter[int] = Counter()

    async def answer(number: int) -> Answer:
        tries[number] += 1
        if tries[number] <= number % 4:
            return (429, 503)[number % 2], {}, {"error": {"message": "full"}}
        return 200, {}, {}

    output = await _run(answering(answer), numbered(tmp_path / "in.jsonl", 20))
    assert {line["response"]["status_code"] for line in output} == {200}
    assert tries == {number: number % 4 + 1 for number in range(20)}


async def test_full_backend_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    calls = iter([CapacityError("full", 7.0), CapacityError("full", 0.1)])
    backend = ScriptedBackend(lambda prompt_ids: [step] if (step := next(calls, None)) else echo(prompt_ids))
    real_sleep, here = asyncio.sleep, threading.current_thread()

    async def sleep(seconds: float) -> None:
        if threading.current_thread() is not here:  # the server of another file's tests
            await real_sleep(seconds)
            return
        waits.append(seconds)
        await real_sleep(0)

    app = served(tmp_path / "model", backend)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    batch = numbered(tmp_path / "in.jsonl", 1)
    (line,) = await _run(app, batch, retry=RetryPolicy(first_delay_s=2.0))
    assert line["response"]["status_code"] == 200
    assert [wait for wait in waits if wait] == [7.0, 4.0]  # Retry-After; then the doubled delay, which is longer


async def test_request_that_is_always_refused_becomes_an_error(tmp_path: Path) -> None:
    others_answered = asyncio.Event()

    async def answer(number: int) -> Answer:
        if number == 3:
            await others_answered.wait()  # else it is the service that fails, and not this request
            return 429, {}, {"error": {"message": "too big for now"}}
        if number > 3:
            others_answered.set()
        await asyncio.sleep(0.005)
        return 200, {}, {}

    retry = RetryPolicy(give_up_s=0.05, first_delay_s=0.001, max_delay_s=0.01)
    batch = numbered(tmp_path / "in.jsonl", 20)
    output = await _run(answering(answer), batch, concurrency=4, retry=retry)
    assert [line["custom_id"] for line in output if line["error"]] == ["id-3"]
    assert output[3]["response"] is None
    assert output[3]["error"]["code"] == "retries_exhausted"
    assert "429 (too big for now)" in output[3]["error"]["message"]


async def test_service_that_answers_nobody_ends_the_run_and_spoils_no_line(tmp_path: Path) -> None:
    kept = asyncio.Event()

    async def answer(number: int) -> Answer:
        if number < 3:
            return 200, {}, {}
        await kept.wait()  # what is on its way to the disk when the run ends is run again
        return 503, {}, {"error": {"message": "the worker is gone"}}

    async def keep(results: Sequence[LineResult]) -> None:
        assert [each.custom_id for each in results] == ["id-0", "id-1", "id-2"] and not kept.is_set()
        kept.set()

    batch = numbered(tmp_path / "in.jsonl", 20)
    retry = RetryPolicy(give_up_s=0.7, first_delay_s=0.001, max_delay_s=0.1)
    with pytest.raises(ServiceStalled, match=r"503 \(the worker is gone\)"):
        await run_lines(answering(answer), batch.lines, keep, asyncio.Semaphore(1), retry=retry)


async def test_defect_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(number: int) -> Answer:
        if number == 2:
            raise ValueError("a defect")
        return 200, {}, {}

    output = await _run(answering(answer), numbered(tmp_path / "in.jsonl", 5))
    errors = [line["error"] for line in output]
    assert errors == [None, None, {"code": "internal_error", "message": "ValueError: a defect"}, None, None]
    assert "line 3 could not be run" in caplog.text


async def test_a_run_that_is_cut_off_gives_its_places_back(tmp_path: Path) -> None:
    cut_off, places = asyncio.Event(), asyncio.Semaphore(4)

    async def answer(number: int) -> Answer:
        if number == 70:
            cut_off.set()
            await asyncio.Event().wait()
        return 200, {}, {}

    async def keep(results: Sequence[LineResult]) -> None:
        pass

    run = asyncio.create_task(run_lines(answering(answer), numbered(tmp_path / "in.jsonl", 100).lines, keep, places))
    await cut_off.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await asyncio.wait_for(asyncio.gather(*(places.acquire() for _ in range(4))), 60)


async def test_results_that_cannot_be_kept_end_the_run(tmp_path: Path) -> None:
    async def keep(results: Sequence[LineResult]) -> None:
        raise FarsightError("the disk is full")

    with pytest.raises(FarsightError, match="the disk is full"):
        lines = numbered(tmp_path / "in.jsonl", 500).lines
        await run_lines(answering(_ok), lines, keep, asyncio.Semaphore(8))


async def test_results_are_kept_in_small_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    limits: list[asyncio.Timeout] = []
    second_group, forty_kept = asyncio.Event(), asyncio.Event()
    real_timeout = asyncio.timeout

    async def keep(results: Sequence[LineResult]) -> None:
        sizes.append(len(results))
        if sum(sizes) == 40:
            forty_kept.set()

    def timeout(seconds: float) -> asyncio.Timeout:
        """Runs out when it is told to: how long keeping takes must not change the groups."""
        assert seconds == GROUP_S
        limits.append(real_timeout(None))
        if len(limits) == 2:
            second_group.set()
        return limits[-1]

    async def answer(number: int) -> Answer:
        if number == 40:
            await second_group.wait()
            limits[1].reschedule(asyncio.get_running_loop().time())
            await forty_kept.wait()
        return 200, {}, {}

    monkeypatch.setattr(asyncio, "timeout", timeout)
    await run_lines(answering(answer), numbered(tmp_path / "in.jsonl", 41).lines, keep, asyncio.Semaphore(8))
    assert sizes == [32, 8, 1]  # full; after half a second; at the end
