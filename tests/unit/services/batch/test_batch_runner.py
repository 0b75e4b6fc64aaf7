"""The runner over the real application, and over small ones where answers must be scripted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from core.errors import CapacityError, FarsightError
from core.forecast import QUANTILES, Forecast
from services.api.batches.lines import Batch, BatchLine, LineResult, read_batch
from services.api.batches.sender import RetryPolicy, ServiceStalled
from services.batch.progress import ProgressStore
from services.batch.runner import GROUP_S, run_batch
from tests.unit.services.api.api_support import ScriptedBackend
from tests.unit.services.batch.batch_support import (
    CHAT,
    answering,
    echo,
    numbered,
    read_output,
    request,
    served,
    write_batch,
)

FAST = RetryPolicy(first_delay_s=0.001, max_delay_s=0.01)
Answer = tuple[int, dict[str, str], Any]


def _silent(num_done: int, num_failed: int) -> None:
    pass


async def _ok(number: int) -> Answer:
    return 200, {}, {}


async def _run_whole(app: Any, batch: Batch, target: Path, **options: Any) -> list[dict[str, Any]]:
    with ProgressStore.open(target, batch) as store:
        await run_batch(app, batch.lines, store, **{"concurrency": 8, "on_done": _silent, "retry": FAST, **options})
        store.finish()
    return read_output(target)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


async def test_answers_and_refusals_of_the_real_application(tmp_path: Path, target: Path) -> None:
    requests = [
        request("a", CHAT),
        request("b"),
        request("c", temperature=-1),
        request("d", prompt="x" * 5_000_000),
        {**request("e"), "body": {"model": "other", "prompt": "hi"}},
    ]
    batch = read_batch(write_batch(tmp_path / "in.jsonl", requests))
    output = await _run_whole(served(tmp_path / "model", ScriptedBackend()), batch, target)
    assert [line["custom_id"] for line in output] == ["a", "b", "c", "d", "e"]
    assert [line["response"]["status_code"] for line in output] == [200, 200, 400, 413, 404]
    assert all(line["error"] is None for line in output)
    assert output[0]["response"]["body"]["choices"][0]["message"]["content"] == "Hello!"
    assert output[1]["response"]["body"]["choices"][0]["text"] == "Hello!"
    assert output[2]["response"]["body"]["error"]["param"] == "temperature"


async def test_concurrency_is_bounded_and_used(tmp_path: Path, target: Path) -> None:
    under_way = most = 0

    async def answer(number: int) -> Answer:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.002)
        under_way -= 1
        return await _ok(number)

    await _run_whole(answering(answer), numbered(tmp_path / "in.jsonl", 50), target, concurrency=7)
    assert most == 7


async def test_the_longest_forecast_begins_first_and_the_output_is_in_order(tmp_path: Path, target: Path) -> None:
    begun: list[int] = []

    async def answer(number: int) -> Answer:
        begun.append(number)
        return 200, {"X-Request-Id": f"r-{number}"}, {"number": number}

    async def forecast_lines(lines: Sequence[BatchLine]) -> list[Forecast | None]:
        return [Forecast(float(line.number), (1.0,) * len(QUANTILES), 1, "forest", 1) for line in lines]

    batch = numbered(tmp_path / "in.jsonl", 9)
    output = await _run_whole(answering(answer), batch, target, concurrency=1, forecast_lines=forecast_lines)
    assert begun == list(reversed(range(9)))
    assert [line["response"]["body"]["number"] for line in output] == list(range(9))
    assert [line["response"]["request_id"] for line in output] == [f"r-{i}" for i in range(9)]


async def test_refused_requests_are_tried_again(tmp_path: Path, target: Path) -> None:
    tries: Counter[int] = Counter()

    async def answer(number: int) -> Answer:
        tries[number] += 1
        if tries[number] <= number % 4:
            return (429, 503)[number % 2], {}, {"error": {"message": "full"}}
        return 200, {}, {}

    output = await _run_whole(answering(answer), numbered(tmp_path / "in.jsonl", 20), target)
    assert {line["response"]["status_code"] for line in output} == {200}
    assert tries == {number: number % 4 + 1 for number in range(20)}


async def test_full_backend_is_tried_again(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    (line,) = await _run_whole(app, batch, target, retry=RetryPolicy(first_delay_s=2.0))
    assert line["response"]["status_code"] == 200
    assert [wait for wait in waits if wait] == [7.0, 4.0]  # Retry-After; then the doubled delay, which is longer


async def test_request_that_is_always_refused_becomes_an_error(tmp_path: Path, target: Path) -> None:
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
    output = await _run_whole(answering(answer), batch, target, concurrency=4, retry=retry)
    assert [line["custom_id"] for line in output if line["error"]] == ["id-3"]
    assert output[3]["response"] is None
    assert output[3]["error"]["code"] == "retries_exhausted"
    assert "429 (too big for now)" in output[3]["error"]["message"]


async def test_service_that_answers_nobody_ends_the_run_and_spoils_no_line(tmp_path: Path, target: Path) -> None:
    kept = asyncio.Event()

    async def answer(number: int) -> Answer:
        if number < 3:
            return 200, {}, {}
        await kept.wait()  # what is on its way to the disk when the run ends is run again
        return 503, {}, {"error": {"message": "the worker is gone"}}

    def report(num_done: int, num_failed: int) -> None:
        if num_done == 3:
            kept.set()

    batch = numbered(tmp_path / "in.jsonl", 20)
    retry = RetryPolicy(give_up_s=0.7, first_delay_s=0.001, max_delay_s=0.1)
    with pytest.raises(ServiceStalled, match=r"503 \(the worker is gone\)"):
        await _run_whole(answering(answer), batch, target, concurrency=1, retry=retry, on_done=report)
    with ProgressStore.open(target, batch) as store:
        assert (store.num_done, store.num_failed) == (3, 0)


async def test_defect_costs_one_line(tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(number: int) -> Answer:
        if number == 2:
            raise ValueError("a defect")
        return 200, {}, {}

    output = await _run_whole(answering(answer), numbered(tmp_path / "in.jsonl", 5), target)
    errors = [line["error"] for line in output]
    assert errors == [None, None, {"code": "internal_error", "message": "ValueError: a defect"}, None, None]
    assert "line 3 could not be run" in caplog.text


async def test_only_what_is_left_is_run(tmp_path: Path, target: Path) -> None:
    seen: Counter[int] = Counter()
    reports: list[tuple[int, int]] = []
    ended = asyncio.Event()

    async def answer(number: int) -> Answer:
        seen[number] += 1
        if number == 70 and not ended.is_set():
            ended.set()
            await asyncio.Event().wait()
        return (400 if number == 7 else 200), {}, {"number": number}

    def report(num_done: int, num_failed: int) -> None:
        reports.append((num_done, num_failed))

    batch = numbered(tmp_path / "in.jsonl", 100)
    with ProgressStore.open(target, batch) as store:
        run = asyncio.create_task(run_batch(answering(answer), batch.lines, store, concurrency=4, on_done=_silent))
        await ended.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    with ProgressStore.open(target, batch) as store:
        kept = {number for number in range(100) if f"id-{number}" in store}
        assert 0 < len(kept) < 100
        seen.clear()
        await run_batch(answering(answer), batch.lines, store, concurrency=4, on_done=report)
        store.finish()
    assert seen == dict.fromkeys(set(range(100)) - kept, 1)
    assert reports[-1] == (100, 1)
    assert reports == sorted(reports)


async def test_store_that_fails_ends_the_run(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(self: ProgressStore, results: list[LineResult]) -> None:
        raise FarsightError("the disk is full")

    monkeypatch.setattr(ProgressStore, "append", append)
    with pytest.raises(FarsightError, match="the disk is full"):
        await _run_whole(answering(_ok), numbered(tmp_path / "in.jsonl", 500), target)


async def test_results_are_kept_in_small_groups(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    limits: list[asyncio.Timeout] = []
    second_group, forty_kept = asyncio.Event(), asyncio.Event()
    real_append, real_timeout = ProgressStore.append, asyncio.timeout

    def append(self: ProgressStore, results: list[LineResult]) -> None:
        sizes.append(len(results))
        real_append(self, results)

    def timeout(seconds: float) -> asyncio.Timeout:
        """Runs out when it is told to: how long the disk takes must not change the groups."""
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

    def report(num_done: int, num_failed: int) -> None:
        if num_done == 40:
            forty_kept.set()

    monkeypatch.setattr(ProgressStore, "append", append)
    monkeypatch.setattr(asyncio, "timeout", timeout)
    await _run_whole(answering(answer), numbered(tmp_path / "in.jsonl", 41), target, on_done=report)
    assert sizes == [32, 8, 1]  # full; after half a second; at the end


@pytest.fixture(autouse=True)
def whole_lines(target: Path) -> Iterator[None]:
    """Whatever a test did, each line of an output is one JSON object."""
    yield
    if target.exists():
        assert all(isinstance(json.loads(line), dict) for line in target.read_bytes().splitlines())
