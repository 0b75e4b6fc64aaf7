"""What every log store does, wherever it keeps its log."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from farsight.actors.log.log_store import MAX_PAGE, LogStore
from farsight.core.errors import FarsightError, MessageError
from farsight.core.messages.log import (
    FinishedRequest,
)
from tests.unit.actors.components import (
    append,
    append_batches,
    append_forecasts,
    append_traces,
    artefact,
    component_context,
    finished,
    finished_batch,
    forecast_record,
    list_artefacts,
    num_counted,
    opened,
    put,
    read,
    read_artefact,
    read_batches,
    read_examples,
    read_ids,
    read_traces,
    set_current,
    trace,
)


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
        for late in (
            append(store, finished("late")),
            append_forecasts(store, forecast_record("a")),
            append_batches(store, finished_batch("a")),
            put(store, artefact(1)),
            set_current(store, 1),
            read(store),
            read_artefact(store),
            list_artefacts(store),
            read_examples(store),
            read_batches(store),
        ):
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
