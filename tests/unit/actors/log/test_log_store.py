"""What every log store does, wherever it keeps its log."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.log.log_store import MAX_EXAMPLES, MAX_PAGE, LogStore
from core.codec import encode
from core.errors import FarsightError, MessageError
from core.messages.log import (
    MAX_FEATURE_BYTES,
    ArtefactInfo,
    ArtefactName,
    BatchPage,
    FinishedBatch,
    FinishedBatches,
    FinishedRequest,
    FinishedRequests,
    ForecastRecord,
    ForecastRecords,
    LogQuery,
)
from tests.unit.actors.components import (
    append,
    append_forecasts,
    append_traces,
    artefact,
    component_context,
    example_ids,
    finished,
    finished_batch,
    forecast_record,
    list_artefacts,
    opened,
    put,
    read,
    read_artefact,
    read_examples,
    read_ids,
    read_traces,
    set_current,
    trace,
    versions,
)
from tests.unit.actors.redis_server import RedisServer, redis_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(params=["sqlite", "redis"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a new log."""
    if request.param == "sqlite":
        return str(tmp_path / "log.sqlite")
    running: RedisServer = request.getfixturevalue("server")
    running.empty()
    return running.url


def num_counted(store: LogStore, kind: str = "requests") -> float | None:
    return store.context.registry.get_sample_value("farsight:log_records_total", {"kind": kind})


async def append_batches(store: LogStore, *records: FinishedBatch) -> None:
    await store.append_batches(FinishedBatches(records))


async def read_batches(store: LogStore, after_row: int = 0, limit: int = 1000) -> BatchPage:
    return await store.read_batches(LogQuery(after_row, limit))


async def test_what_goes_in_comes_out_in_order(path: str) -> None:
    records = [
        finished("a"),
        FinishedRequest("b", "1", 3, 2**63 - 1, 0, 0, "abort", 0.1 + 0.2, None, 1e-300),
        finished("ü\0'\"; DROP TABLE finished_requests"),
    ]
    async with opened(path=path) as store:
        assert store.last_step_age_s is None
        await append(store, *records[:1])
        await append(store, *records[1:])
        page = await read(store)
        assert page.records == tuple(records)
        assert page.last_row == 3
        assert num_counted(store) == 3
        assert (store.kind, store.name, store.state, store.queue) == ("LogStore", "log-store", "ready", 0)
        assert store.last_step_age_s is not None
        assert store.last_step_age_s >= 0


async def test_pages_follow_one_another_and_the_end_is_told(path: str) -> None:
    async with opened(path=path) as store:
        assert (await read(store)).last_row == 0
        await append(store, *(finished(f"{i}") for i in range(7)))
        first = await read(store, 0, 4)
        second = await read(store, first.last_row, 4)
        assert [each.request_id for each in first.records + second.records] == [f"{i}" for i in range(7)]
        assert (first.last_row, second.last_row) == (4, 7)
        assert await read(store, 7, 4) == await read(store, 2**63 - 1, 0) == await read(store, 2**64 - 1, 5)
        assert (await read(store, 7, 4)).last_row == 7
        assert (await read(store, 5, 0)).last_row == 5
        assert (await read(store, 0, -1)).records == ()


async def test_a_page_has_its_limit_whatever_is_asked_for(path: str) -> None:
    async with opened(path=path) as store:
        await append(store, *(finished(f"{i}") for i in range(MAX_PAGE + 1)))
        page = await read(store, 0, 10**9)
        assert (len(page.records), page.last_row) == (MAX_PAGE, MAX_PAGE)


async def test_a_request_is_written_once(path: str) -> None:
    async with opened(path=path) as store:
        await append(store, finished("a", 1), finished("a", 2))
        await append(store, finished("b", 3), finished("a", 4))
        assert [(each.request_id, each.output_len) for each in (await read(store)).records] == [("a", 1), ("b", 3)]
        assert num_counted(store) == 2
        await append(store)


async def test_the_oldest_go_when_there_are_too_many_and_duplicates_do_not_count(path: str) -> None:
    async with opened(path=path, max_rows=5) as store:
        for i in range(20):
            await append(store, finished(f"{i}"), finished(f"{i}"))
            assert await read_ids(store) == [f"{j}" for j in range(max(0, i - 4), i + 1)]
        await append(store, *(finished(f"big-{i}") for i in range(8)))
        assert await read_ids(store) == [f"big-{i}" for i in range(3, 8)]


async def test_a_restart_goes_on_where_the_log_ends(path: str) -> None:
    async with opened(path=path, max_rows=4) as store:
        await append(store, finished("a"), finished("b"), finished("c"))
        last_row = (await read(store)).last_row
    async with opened(path=path, max_rows=4) as store:
        await append(store, finished("b"), finished("d"), finished("e"))
        assert await read_ids(store, last_row) == ["d", "e"]
        assert await read_ids(store) == ["b", "c", "d", "e"]
    async with opened(path=path, max_rows=2) as store:
        await append(store, finished("f"))
        assert await read_ids(store) == ["e", "f"], "a limit that was lowered holds"


async def test_a_caller_that_gave_up_harms_nobody(path: str) -> None:
    async with opened(path=path) as store:
        tasks = [asyncio.create_task(append(store, finished(name))) for name in "abc"]
        await asyncio.sleep(0)
        assert store.queue == 3
        tasks[1].cancel()
        await asyncio.wait(tasks)
        await append(store, finished("d"))
        assert {"a", "c", "d"} <= set(await read_ids(store))


async def test_a_number_too_large_is_refused_by_name_and_spoils_no_other_append(path: str) -> None:
    async with opened(path=path) as store:
        good = asyncio.create_task(append(store, finished("a")))
        with pytest.raises(MessageError, match="output_len"):
            await append(store, finished("b", 2**63))
        await good
        assert await read_ids(store) == ["a"]


async def test_closing_writes_what_was_given_and_then_refuses(path: str) -> None:
    async with opened(path=path) as store:
        tasks = [asyncio.create_task(append(store, finished(f"{i}"))) for i in range(10)]
        await asyncio.sleep(0)
        assert store.queue == 10
        await store.stop()
        await asyncio.gather(*tasks)
        for late in (append(store, finished("late")), read(store)):
            with pytest.raises(FarsightError, match="log-store is closed"):
                await late
    async with opened(path=path) as store:
        assert len(await read_ids(store)) == 10


async def test_another_store_may_follow_in_the_same_process(path: str) -> None:
    context = component_context("log-store", path=path)
    for name in "ab":
        store = LogStore(context)
        await store.start()
        await append(store, finished(name))
        await store.stop()
        assert not store.failed.done()
    assert num_counted(store) == 2


async def test_a_message_of_another_kind_is_refused(path: str) -> None:
    async with opened(path=path) as store:
        with pytest.raises(MessageError, match="FinishedRequests"):
            await store.answer("append", b"\xc1")
        with pytest.raises(MessageError, match="LogQuery"):
            await store.answer("read", encode(FinishedRequests(())))


async def test_examples_are_requests_with_an_end_and_a_forecast_in_order_of_finishing(path: str) -> None:
    async with opened(path=path) as store:
        assert (await read_examples(store)).last_row == 0
        await append_forecasts(store, *(forecast_record(each) for each in "abcde"))
        await append(store, finished("d", 4), finished("stranger"), finished("b", 2))
        await append(store, finished("a", 1))
        page = await read_examples(store)
        assert [(each.finished, each.forecast) for each in page.examples] == [
            (finished(name, length), forecast_record(name)) for name, length in (("d", 4), ("b", 2), ("a", 1))
        ]
        first = await read_examples(store, 0, 2)
        assert [each.finished.request_id for each in first.examples] == ["d", "b"]
        assert await example_ids(store, first.last_row, 2) == ["a"]
        assert await read_examples(store, page.last_row) == await read_examples(store, 2**63 - 1, 0)
        assert (await read_examples(store, page.last_row)).last_row == page.last_row
        assert num_counted(store, "forecasts") == 5


async def test_what_was_forecast_comes_back_bit_by_bit(path: str) -> None:
    odd = ForecastRecord("ü\0", 0.1 + 0.2, "", -1, 1e-300, (-0.0, 0, 0.1, 1e300, 1e300, 1e301), -5e-324, "v", b"")
    large = forecast_record("large", features=bytes(range(256)) * (MAX_FEATURE_BYTES // 256))
    async with opened(path=path) as store:
        await append_forecasts(store, odd, large)
        await append(store, finished(odd.request_id), finished("large"))
        assert [each.forecast for each in (await read_examples(store)).examples] == [odd, large]


async def test_a_forecast_that_comes_late_is_found_by_who_has_read_on(path: str) -> None:
    async with opened(path=path) as store:
        await append_forecasts(store, forecast_record("b"))
        await append(store, finished("a"), finished("b"))
        page = await read_examples(store)
        assert [each.finished.request_id for each in page.examples] == ["b"]
        await append_forecasts(store, forecast_record("a"))
        assert await example_ids(store, page.last_row) == ["a"]
    async with opened(path=path) as store:
        assert await example_ids(store) == ["b", "a"]


async def test_what_comes_together_is_one_commit_with_forecasts_first(path: str) -> None:
    async with opened(path=path) as store:
        tasks = [
            asyncio.create_task(each)
            for each in (
                append(store, finished("b"), finished("a")),
                append_forecasts(store, forecast_record("a"), forecast_record("b")),
                append_batches(store, finished_batch("0")),
            )
        ]
        await asyncio.gather(*tasks)
        assert await example_ids(store) == ["b", "a"]
        assert (await read_batches(store)).records == (finished_batch("0"),)


async def test_the_first_forecast_of_a_request_is_kept(path: str) -> None:
    async with opened(path=path) as store:
        await append_forecasts(store, forecast_record("a", 1.0), forecast_record("a", 2.0))
        await append_forecasts(store, forecast_record("a", 3.0))
        await append(store, finished("a"))
        await append(store, finished("a"))
        await append_forecasts(store, forecast_record("a", 4.0))
        assert [each.forecast.mean for each in (await read_examples(store)).examples] == [1.0]
        assert num_counted(store, "forecasts") == 1


async def test_an_example_goes_with_its_forecast_or_its_request_and_pages_stay_full(path: str) -> None:
    async with opened(path=path, max_rows=4) as store:
        await append_forecasts(store, *(forecast_record(each) for each in "abcd"))
        await append(store, *(finished(each) for each in "abcd"))
        await append(store, finished("without"))
        assert await example_ids(store) == ["b", "c", "d"]
        await append_forecasts(store, forecast_record("never-1"), forecast_record("never-2"))
        assert await example_ids(store, limit=1) == ["c"]
        assert await example_ids(store) == ["c", "d"]
        last_row = (await read_examples(store)).last_row
        await append_forecasts(store, *(forecast_record(f"never-{i}") for i in range(3, 9)))
        assert await read_examples(store, 0) == await read_examples(store, 0, 0)
        assert (await read_examples(store, last_row)).last_row == last_row, "row numbers are not given again"
        await append_forecasts(store, forecast_record("without"))
        assert await example_ids(store, last_row) == ["without"]


async def test_a_limit_that_was_lowered_holds_for_all_kinds(path: str) -> None:
    async with opened(path=path) as store:
        await append(store, *(finished(f"{i}") for i in range(9)))
        await append_forecasts(store, *(forecast_record(f"{i}") for i in range(9)))
        await append_batches(store, *(finished_batch(f"{i}") for i in range(9)))
    async with opened(path=path, max_rows=3) as store:
        await append_batches(store, finished_batch("new"))
        assert [each.batch_id for each in (await read_batches(store)).records] == ["7", "8", "new"]
        assert await read_ids(store) == await example_ids(store) == ["6", "7", "8"]


async def test_examples_are_what_a_plain_list_says(path: str) -> None:
    """Against a model of lists, over messages at random, repeated ids and a small limit."""
    rng = random.Random(7)
    kept: dict[str, list[str]] = {"requests": [], "forecasts": []}
    examples: list[str] = []
    made: list[str] = []
    seen: list[str] = []
    last_row = 0
    async with opened(path=path, max_rows=6) as store:
        for _ in range(120):
            ids = [f"{rng.randrange(25)}" for _ in range(rng.randrange(1, 5))]
            kind, other = rng.sample(["requests", "forecasts"], 2)
            if kind == "requests":
                await append(store, *(finished(each) for each in ids))
            else:
                await append_forecasts(store, *(forecast_record(each) for each in ids))
            num_before = len(examples)
            for each in ids:
                if each not in kept[kind]:
                    kept[kind].append(each)
                    examples += [each] * (each in kept[other])
            new = examples[num_before:]
            kept[kind] = kept[kind][-6:]
            gone = set(examples) - (set(kept["requests"]) & set(kept["forecasts"]))
            examples = [each for each in examples if each not in gone]
            made += [each for each in new if each not in gone]
            assert await example_ids(store) == examples
            assert await read_ids(store) == kept["requests"]
            page = await read_examples(store, last_row)
            seen += [each.finished.request_id for each in page.examples]
            last_row = page.last_row
            assert seen == made, "a reader that goes on misses nothing and sees nothing twice"
    assert len(seen) > 30


async def test_batches_come_back_in_pages_each_once(path: str) -> None:
    batches = [finished_batch(f"{i}", i) for i in range(5)]
    async with opened(path=path) as store:
        assert await read_batches(store, 7) == BatchPage(0, ())
        await append_batches(store, *batches[:3])
        await append_batches(store, *batches[2:], batches[0])
        first = await read_batches(store, 0, 3)
        rest = await read_batches(store, first.last_row, 3)
        assert [*first.records, *rest.records] == batches
        assert num_counted(store, "batches") == 5
        assert (await read(store)).last_row == 0, "each kind has rows of its own"


async def test_pages_of_examples_and_batches_have_their_limits(path: str) -> None:
    async with opened(path=path) as store:
        await append_forecasts(store, *(forecast_record(f"{i}") for i in range(MAX_EXAMPLES + 1)))
        await append(store, *(finished(f"{i}") for i in range(MAX_EXAMPLES + 1)))
        assert len((await read_examples(store, 0, 10**9)).examples) == MAX_EXAMPLES
        assert (await read_examples(store, 0, -1)).examples == ()
        await append_batches(store, *(finished_batch(f"{i}") for i in range(MAX_PAGE + 1)))
        assert len((await read_batches(store, 0, 10**9)).records) == MAX_PAGE


async def test_an_artefact_is_read_by_version_and_listed_without_its_data(path: str) -> None:
    first, second = artefact(1), dataclasses.replace(artefact(7, bytes(5_000_000)), score=None, note="ü: 'x'\0")
    async with opened(path=path) as store:
        assert await list_artefacts(store) == ()
        await put(store, first, second, artefact(3, kind="knn:all"))
        assert (await read_artefact(store, 1), await read_artefact(store, 7)) == (first, second)
        assert (
            await read_artefact(store, 2) is await read_artefact(store) is await read_artefact(store, 1, "none") is None
        )
        assert await read_artefact(store, 3, "knn:all") == artefact(3, kind="knn:all")
        assert num_counted(store, "artefacts") == 3
        assert store.last_step_age_s is not None
        await set_current(store, 7)
    async with opened(path=path) as store:
        assert await read_artefact(store) == second
        assert await read_artefact(store, kind="knn:all") is None
        assert await list_artefacts(store) == (
            ArtefactInfo("forest", 1, 1.7e9 + 0.1, 0.1 + 0.2, 500, "of tests", len(first.data), False),
            ArtefactInfo("forest", 7, 1.7e9 + 0.1, None, 500, "ü: 'x'\0", 5_000_000, True),
            ArtefactInfo("knn:all", 3, 1.7e9 + 0.1, 0.1 + 0.2, 500, "of tests", len(first.data), False),
        )


async def test_a_version_is_never_changed_and_may_be_repeated(path: str) -> None:
    async with opened(path=path, max_artefacts=2) as store:
        await put(store, artefact(2), artefact(3), artefact(3), artefact(2))
        assert num_counted(store, "artefacts") == 2
        for refused in (artefact(3, b"other"), dataclasses.replace(artefact(3), score=0.5), artefact(1)):
            with pytest.raises(MessageError, match=r"Artefact.version: got \d, expected a version above 3"):
                await put(store, refused)
        await put(store, artefact(10))
        assert (await versions(store))[0] == [3, 10]
        with pytest.raises(MessageError, match="above 10"):  # it is gone and does not come back
            await put(store, artefact(2))
        assert await read_artefact(store, 3) == artefact(3)
        await put(store, artefact(1, kind="another"))


async def test_the_newest_artefacts_stay_and_the_current_one(path: str) -> None:
    async with opened(path=path, max_artefacts=2) as store:
        await put(store, artefact(1), artefact(1, kind="another"))
        await set_current(store, 1)
        await put(store, artefact(2), artefact(3), artefact(4))
        assert await versions(store) == ([1, 3, 4], 1)
        await set_current(store, 4)
        assert await versions(store) == ([3, 4], 4)
        await set_current(store, 3)
        assert await versions(store) == ([3, 4], 3), "an earlier one may be used again"
        for unknown in (1, 5):
            with pytest.raises(MessageError, match=rf"ArtefactName.version: got {unknown}, expected .*kept"):
                await set_current(store, unknown)
        with pytest.raises(MessageError, match=r"ArtefactName.version: got None"):
            await set_current(store, None)
        assert await versions(store) == ([3, 4], 3)
        assert await versions(store, "another") == ([1], None)
    async with opened(path=path, max_artefacts=1) as store:
        await put(store, artefact(2**53))
        assert await versions(store) == ([3, 2**53], 3)
        await set_current(store, 2**53)
        assert await versions(store) == ([2**53], 2**53)


BAD_FORECASTS: dict[str, list[Any]] = {
    "quantiles": [(), (1.0,) * 5, (1.0, 2.0, 3.0, 2.9, 5.0, 6.0)],
    "features": [bytes(MAX_FEATURE_BYTES + 1)],
    "version": [2**63],
    "mean": [float("nan"), float("inf")],
    "request_id": [7],
}
BAD_BATCHES: dict[str, list[Any]] = {
    "num_requests": [0, 2**63],
    "batch_len": [-1],
    "generation_len": [-1, 2**64 - 1],
    "predicted_len": [-1],
    "estimated_time_s": [-0.1],
    "serving_time_s": [-0.1, "long"],
    "finished_at": [float("inf")],
}
BAD_ARTEFACTS: dict[str, list[Any]] = {
    "kind": [""],
    "version": [0, -1, 2**53 + 1],
    "num_examples": [-1, 2**63],
    "data": [bytes(1001), "text"],
    "score": [float("nan")],
}


def unchecked(record: object, field: str, value: object) -> object:
    """A record as another sender might make it."""
    changed = object.__new__(type(record))
    for each in dataclasses.fields(record):  # type: ignore[arg-type]
        object.__setattr__(changed, each.name, value if each.name == field else getattr(record, each.name))
    return changed


async def test_what_is_wrong_is_refused_by_the_name_of_its_field_and_nothing_is_written(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.messages.log.MAX_ARTEFACT_BYTES", 1000)
    async with opened(path=path) as store:
        for message, make, method, fields in (
            (ForecastRecords, forecast_record, "append_forecasts", BAD_FORECASTS),
            (FinishedBatches, finished_batch, "append_batches", BAD_BATCHES),
        ):
            for field, value in ((field, value) for field, values in fields.items() for value in values):
                bad = unchecked(make("b"), field, value)
                with pytest.raises(MessageError) as caught:
                    await store.answer(method, encode(message((make("a"), bad))))  # type: ignore[arg-type]
                assert caught.value.field.startswith(f"{message.__name__}.records[1].{field}")
        for field, value in ((field, value) for field, values in BAD_ARTEFACTS.items() for value in values):
            with pytest.raises(MessageError) as caught:
                await store.answer("put_artefact", encode(unchecked(artefact(1), field, value)))
            assert caught.value.field == f"Artefact.{field}"
        for version in (0, 2**53 + 1):
            for method in ("read_artefact", "set_current"):
                with pytest.raises(MessageError) as caught:
                    await store.answer(method, encode(unchecked(ArtefactName("forest", 1), "version", version)))
                assert caught.value.field == "ArtefactName.version"
        await append(store, finished("a"), finished("b"))
        assert await example_ids(store) == []
        assert (await read_batches(store)).records == ()
        assert await list_artefacts(store) == ()


async def test_after_closing_everything_is_refused(path: str) -> None:
    async with opened(path=path) as store:
        await store.stop()
        for late in (
            append_forecasts(store, forecast_record("a")),
            append_batches(store, finished_batch("a")),
            put(store, artefact(1)),
            set_current(store, 1),
            read_artefact(store),
            list_artefacts(store),
            read_examples(store),
            read_batches(store),
        ):
            with pytest.raises(FarsightError, match="log-store is closed"):
                await late


async def test_traces_are_found_by_the_answer_that_they_belong_to_also_after_a_restart(path: str) -> None:
    mine = [trace("cmpl-a", "i-0", "0"), trace("cmpl-a", "i-0", "ingress"), trace("cmpl-a", "i-1", "0")]
    async with opened(path=path) as store:
        await append_traces(store, trace("cmpl-ab"), *reversed(mine), trace("cmpl-"), trace("cmpl-b"))
        await append_traces(store, dataclasses.replace(mine[0], decisions=b"again"))
        assert num_counted(store, "traces") == 6
    async with opened(path=path) as store:
        assert await read_traces(store, "cmpl-a") == tuple(mine)
        assert await read_traces(store, "cmpl-c") == ()
        assert await read_traces(store, "cmpl-%") == ()


async def test_the_oldest_traces_go(path: str) -> None:
    async with opened(path=path, max_rows=3) as store:
        for i in range(5):
            await append_traces(store, trace(f"cmpl-{i}"), trace(f"cmpl-{i}", part="ingress"))
        found = [len(await read_traces(store, f"cmpl-{i}")) for i in range(5)]
        assert found == [0, 0, 0, 1, 2]
        assert [each.trace_id for each in await read_traces(store, "cmpl-3")] == ["cmpl-3/i-0/ingress"]
