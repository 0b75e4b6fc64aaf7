"""Resumable streams: whichever replica runs them, and whatever dies, a client reads each event once and in order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from farsight.core.errors import CapacityError
from farsight.core.messages.resumable import StreamChanges, StreamVerdicts
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Request
from farsight.services.api.errors import ApiError, as_api_error
from farsight.services.api.generation import PromptText
from farsight.services.api.streams import manager
from farsight.services.api.streams.live import EventWriter, LiveStream
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import until
from tests.unit.services.api.streams.stream_support import (
    HttpSide,
    PacedBackend,
    Reader,
    Replica,
    events_of,
    http_side,
)

FULL = CapacityError("full", 2.0)
BROKEN = ApiError("The generation failed: a reason.", status=503, code="generation_failed")


@pytest.fixture
async def side(encoder: PromptEncoder) -> AsyncIterator[HttpSide]:
    async with http_side(encoder) as found:
        yield found


async def begun(side: HttpSide, replica: Replica, num_events: int, **fields: Any) -> tuple[LiveStream, Reader]:
    """A stream whose reader has so many events, one of each token."""
    live = await replica.start(**fields)
    reader = replica.read(live)
    side.backend.allow(num_events)
    await until(lambda: len(reader.events) == num_events)
    return live, reader


async def lost(side: HttpSide, num_events: int, **fields: Any) -> tuple[str, Reader]:
    """The id of such a stream, whose replica has died with its connections, and what its reader has."""
    replica = side.replica()
    live, reader = await begun(side, replica, num_events, **fields)
    await until(live.show)
    await replica.die()
    await reader.leave()
    return live.state.stream_id, reader


async def resumed(replica: Replica, stream_id: str, after: int = 0) -> Reader:
    return await replica.read(await replica.resume(stream_id), after).finish()


def texts(reader: Reader) -> str:
    chunks = [json.loads(data) for data in reader.data if data != "[DONE]"]
    return "".join(choice.get("text", "") for chunk in chunks for choice in chunk["choices"])


def assert_whole(*readers: Reader, num_tokens: int = 8) -> None:
    """Together the readers have every event once, in order, to the end."""
    events = [each for reader in readers for each in reader.events]
    numbers = [int(event_id.partition("-")[2]) for event_id, _ in events]
    assert numbers == list(range(1, len(events) + 1))
    assert events[-1][1] == "[DONE]"
    assert "".join(map(texts, readers)) == "".join(f"{number} " for number in range(num_tokens))


async def test_a_client_that_comes_back_to_the_same_replica_costs_no_second_run(side: HttpSide) -> None:
    replica = side.replica()
    live, first = await begun(side, replica, 3)
    await first.leave()
    side.backend.allow(5)
    assert_whole(first, await resumed(replica, live.state.stream_id, 3))
    assert side.backend.num_opened == 1


async def test_another_replica_goes_on_where_a_dead_one_ended(side: HttpSide) -> None:
    stream_id, first = await lost(side, 3)
    other = side.replica()
    side.backend.allow(5)
    second = await resumed(other, stream_id, 3)
    assert_whole(first, second)
    assert side.backend.continued == [(), (0, 1, 2)]
    third = await resumed(other, stream_id, 1)
    assert [*first.events[:1], *third.events] == [*first.events, *second.events]


async def test_all_choices_go_on(side: HttpSide) -> None:
    stream_id, first = await lost(side, 10, n=3, max_tokens=4, prompt=["a", "b"])
    side.backend.allow(100)
    second = await resumed(side.replica(), stream_id, first.last_number)
    choices: dict[int, str] = {}
    for data in [*first.data, *second.data][:-1]:
        for choice in json.loads(data)["choices"]:
            choices[choice["index"]] = choices.get(choice["index"], "") + choice["text"]
    assert choices == dict.fromkeys(range(6), "0 1 2 3 ")


async def test_clients_see_nothing_that_the_store_does_not_have(side: HttpSide) -> None:
    live, reader = await begun(side, side.replica(), 2)
    side.store.away = True
    side.backend.allow(6)
    await until(lambda: live.ended)
    await asyncio.sleep(0.1)
    assert reader.last_number == 2
    side.store.away = False
    assert_whole(await reader.finish())


async def test_a_new_store_learns_of_every_stream_that_is_run(side: HttpSide) -> None:
    one, other = side.replica(), side.replica()
    live, first = await begun(side, one, 3)
    side.store.die()
    with pytest.raises(ApiError, match="cannot be looked up now") as caught:
        await other.resume("0" * 32)
    assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "1"})
    side.backend.allow(1)
    await until(lambda: first.last_number == 4)
    await one.die()
    await first.leave()
    side.backend.allow(4)
    assert_whole(first, await resumed(other, live.state.stream_id, 4))


async def test_a_replica_whose_stream_was_taken_ends_its_run(side: HttpSide) -> None:
    one, other = side.replica(), side.replica()
    live, first = await begun(side, one, 2)
    second = other.read(await other.resume(live.state.stream_id), 2)
    side.backend.allow(2)
    await first.finish()
    assert json.loads(first.data[-1])["error"]["code"] == "stream_superseded"
    assert len(one.manager) == 0
    side.backend.allow(100)
    await second.finish()
    first.events.pop()
    assert_whole(first, second)
    assert side.backend.num_closed == 2


async def test_a_verdict_about_a_stream_that_was_taken_back_meanwhile_ends_nothing(
    side: HttpSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "KEEP_S", 0.01)
    one, other = side.replica(), side.replica()
    live = await one.start()
    await until(live.show)
    change, told, back = side.store.change, asyncio.Event(), asyncio.Event()

    async def late(changes: StreamChanges) -> StreamVerdicts:
        verdicts = await change(changes)
        if verdicts.taken and not told.is_set():
            told.set()
            await back.wait()
        return verdicts

    monkeypatch.setattr(side.store, "change", late)
    await other.resume(live.state.stream_id)
    await told.wait()
    again = await one.resume(live.state.stream_id)
    reader = one.read(again)
    back.set()
    side.backend.allow(100)
    assert_whole(await reader.finish())


async def test_the_last_of_two_readers_gets_the_stream(side: HttpSide) -> None:
    replica = side.replica()
    live, first = await begun(side, replica, 2)
    second = replica.read(await replica.resume(live.state.stream_id))
    await first.finish()
    assert json.loads(first.data[-1])["error"]["code"] == "stream_superseded"
    assert first.events[-1][0] == ""
    side.backend.allow(6)
    assert_whole(await second.finish())


async def test_a_wrong_last_event_id_is_refused_and_disturbs_no_reader(side: HttpSide) -> None:
    replica = side.replica()
    live, first = await begun(side, replica, 2)
    wrong = await replica.read(live, 3).finish()
    assert isinstance(wrong.error, ApiError)
    assert (wrong.error.status, wrong.error.param) == (400, "Last-Event-ID")
    side.backend.allow(6)
    assert_whole(await first.finish())


async def test_a_stream_ends_when_no_client_comes_back(side: HttpSide) -> None:
    replica = side.replica(resume_s=0.05)
    live, reader = await begun(side, replica, 1)
    await asyncio.sleep(0.1)
    assert len(replica.manager) == 1
    await reader.leave()
    await until(lambda: side.backend.num_closed == 1)
    await until(lambda: len(side.store.streams) == 0)
    assert len(replica.manager) == 0
    with pytest.raises(ApiError, match="There is no stream"):
        await replica.resume(live.state.stream_id)


async def test_a_client_that_leaves_before_the_first_event_ends_the_run(side: HttpSide) -> None:
    """It does not know the id, so it cannot come back."""
    replica = side.replica()
    live = await replica.start()
    reader = replica.read(live)
    await until(lambda: side.backend.num_opened == 1 and live.num_readers)
    await reader.leave()
    await until(lambda: side.backend.num_closed == 1 and len(side.store.streams) == 0)


async def test_a_stream_whose_headers_went_out_goes_on_without_a_log_for_want_of_room(encoder: PromptEncoder) -> None:
    async with http_side(encoder, tenant_bytes=700) as side:
        replica = side.replica()
        live = await replica.start(max_tokens=40)
        reader = replica.read(live)
        await until(live.show)
        side.backend.allow(100)
        await reader.finish()
        assert not live.is_buffered
        assert_whole(reader, num_tokens=40)


@pytest.mark.parametrize("failure", [FULL, BROKEN])
async def test_a_refused_request_leaves_nothing(side: HttpSide, failure: Exception) -> None:
    replica = side.replica()
    side.backend.failure = failure
    reader = await replica.read(await replica.start()).finish()
    assert (reader.error, reader.events) == (failure, [])
    await until(lambda: len(side.store.streams) == 0 and len(replica.manager) == 0)


@pytest.mark.parametrize("num_events", [0, 3])
async def test_a_stream_refused_when_it_was_taken_waits_for_another_try(side: HttpSide, num_events: int) -> None:
    stream_id, first = await lost(side, num_events)
    other = side.replica()
    side.backend.failure = FULL
    for _ in range(2):
        assert (await resumed(other, stream_id, num_events)).error is FULL
        await until(lambda: len(other.manager) == 0)
    side.backend.failure = None
    side.backend.allow(8)
    assert_whole(first, await resumed(other, stream_id, num_events))


@pytest.mark.parametrize(("num_tokens", "failure"), [(0, BROKEN), (1, BROKEN), (1, FULL)])
async def test_a_failure_is_the_last_event_and_read_again(side: HttpSide, num_tokens: int, failure: Exception) -> None:
    """Also one before the first token, but after the headers."""
    replica, shown = side.replica(), asyncio.Event()

    class Failing(PacedBackend):
        async def stream(
            self, request: Request, text: PromptText | None = None, key: str = ""
        ) -> AsyncGenerator[TokenDelta, None]:
            await shown.wait()
            for number in range(num_tokens):
                yield TokenDelta("r", 0, number, (number,), f"{number} ", None)
            raise failure

    replica.backend = Failing()
    live = await replica.start()
    reader = replica.read(live)
    await until(live.show)
    shown.set()
    await reader.finish()
    assert json.loads(reader.data[-2]) == as_api_error(failure).body()
    assert (len(reader.data), reader.data[-1]) == (num_tokens + 2, "[DONE]")
    assert all(event_id for event_id, _ in reader.events)
    for after in range(num_tokens + 1):
        assert (await resumed(replica, live.state.stream_id, after)).events == reader.events[after:]


async def test_a_tenants_bytes_are_bounded(encoder: PromptEncoder) -> None:
    """A stream that outgrows the bound goes on without its log; a further one is refused until there is room."""
    async with http_side(encoder, tenant_bytes=1500) as side:
        replica = side.replica()
        live = await replica.start(max_tokens=40)
        reader = replica.read(live)
        side.backend.allow(1)
        await until(lambda: reader.events)
        side.backend.allow(100)
        assert_whole(await reader.finish(), num_tokens=40)
        assert not live.is_buffered
        assert side.store.streams.num_bytes <= 1500
        assert len(replica.manager) == 0
        with pytest.raises(ApiError, match="There is no stream"):
            await replica.resume(live.state.stream_id)
        large = {"n": 8, "stop": [character * 250 for character in "abcd"]}
        refused = await replica.read(await replica.start(**large)).finish()
        assert isinstance(refused.error, CapacityError)


async def test_a_client_that_reads_slowly_delays_no_other_and_misses_nothing(side: HttpSide) -> None:
    """Its output waits in the log, which is bounded, and not in a queue of its own."""
    replica = side.replica()
    slow, quick = await replica.start(), await replica.start()
    writer = EventWriter(slow.state.stream_id, slow.state.record, side.encoder.texts)
    side.backend.allow(1)
    unread = slow.read(0, writer)
    events = events_of(await anext(unread))
    side.backend.allow(100)
    assert_whole(await replica.read(quick).finish())
    await until(lambda: slow.num_stored == len(slow.entries) and slow.ended)
    async for data in unread:
        events += events_of(data)
    assert_whole(Reader(events))


async def test_a_new_store_is_told_of_many_streams_in_several_messages(
    side: HttpSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "ENTRIES_PER_MESSAGE", 10)
    replica = side.replica()
    side.backend.allow(100)
    lives = [await replica.start() for _ in range(5)]
    for live in lives:
        assert_whole(await replica.read(live).finish())
    side.store.die()
    await until(lambda: len(side.store.streams) == 5)
    await replica.die()
    other = side.replica()
    for live in lives:
        assert_whole(await resumed(other, live.state.stream_id))
