"""Waiting ends when it should: by the event, by the time, by a cancellation; work that broke begins anew."""

from __future__ import annotations

import asyncio

import pytest

from farsight.actors.runtime.peer import PeerLost, again_and_again, wait_for


async def test_a_wait_ends_with_the_event_or_the_time() -> None:
    event = asyncio.Event()
    await wait_for(event, 0.0)
    asyncio.get_running_loop().call_soon(event.set)
    await wait_for(event, 1000.0)
    assert event.is_set()


async def test_a_cancellation_that_comes_with_the_event_is_not_lost() -> None:
    event = asyncio.Event()
    task = asyncio.create_task(wait_for(event, 1000.0))
    await asyncio.sleep(0)
    event.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (PeerLost("supervisor"), [("WARNING", "work waits: supervisor is away", False)]),
        (ValueError("a defect"), [("ERROR", "work", True)] * 19),
    ],
    ids=["away: one line without a traceback", "broken: each time with one"],
)
async def test_what_broke_begins_anew_until_it_is_cancelled(
    failure: Exception, told: list[tuple[str, str, bool]], caplog: pytest.LogCaptureFixture
) -> None:
    lives = 0
    lasting = asyncio.Event()

    async def work() -> None:
        nonlocal lives
        lives += 1
        if lives < 20:
            raise failure
        lasting.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(again_and_again(work, 0.0))
    await lasting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(caplog.records) == len(told)
    for record, (level, words, has_traceback) in zip(caplog.records, told, strict=True):
        assert (record.levelname, record.exc_info is not None) == (level, has_traceback)
        assert words in record.getMessage()
