"""The store of resumable streams: epochs, repeated messages, bounds, expiry."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from farsight.actors.log.stream_store import ENTRY_BYTES, FILLING_S, KEEP_S, StoredStreams, StreamStore
from farsight.core.codec import decode, encode
from farsight.core.messages.resumable import (
    StreamChanges,
    StreamEntries,
    StreamEpoch,
    StreamFound,
    StreamName,
    StreamState,
    StreamVerdicts,
)
from tests.unit.actors.components import component_context

FINE = StreamVerdicts()
SIZE = 100


def state(name: str = "s", epoch: int = 1, tenant: str = "t", num: int = 0, *, ended: bool = False) -> StreamState:
    entries = tuple(b"%d" % number for number in range(num))
    return StreamState(name, epoch, tenant, b"owner", bytes(SIZE - ENTRY_BYTES), entries, ended)


def added(start: int, num: int, name: str = "s", epoch: int = 1, *, ended: bool = False) -> StreamChanges:
    entries = tuple(b"%d" % number for number in range(start, start + num))
    return StreamChanges(added=(StreamEntries(name, epoch, start, entries, ended),))


def opened(*states: StreamState) -> StreamChanges:
    return StreamChanges(opened=states)


@pytest.fixture
def streams() -> StoredStreams:
    return StoredStreams(10_000, 30_000, 0.0)


def entries_of(streams: StoredStreams, name: str = "s", now: float = 0.0) -> list[bytes]:
    found = streams.take(name, now)
    assert found is not None
    return list(found.entries)


def test_what_comes_twice_counts_once(streams: StoredStreams) -> None:
    assert streams.change(opened(state(num=2)), 0.0) == FINE
    for _ in range(2):
        assert streams.change(added(2, 3), 0.0) == FINE
    assert streams.change(added(3, 4), 0.0) == FINE
    assert entries_of(streams) == [b"%d" % number for number in range(7)]


def test_a_gap_asks_for_the_whole_stream(streams: StoredStreams) -> None:
    streams.change(opened(state(num=2)), 0.0)
    assert streams.change(added(3, 1), 0.0) == StreamVerdicts(unknown=("s",))
    assert streams.change(added(0, 1, "other"), 0.0) == StreamVerdicts(unknown=("other",))
    assert streams.change(opened(state(num=4)), 0.0) == FINE
    assert len(entries_of(streams)) == 4


def test_a_stream_that_was_taken_is_refused_to_those_before(streams: StoredStreams) -> None:
    streams.change(opened(state(num=2)), 0.0)
    taken = streams.take("s", 0.0)
    assert taken is not None
    assert (taken.epoch, taken.ended, streams.find("s", 0.0)) == (2, False, StreamFound(2, b"owner"))
    lost = StreamVerdicts(taken=("s",))
    assert streams.change(added(2, 1), 0.0) == lost
    assert streams.change(opened(state(num=3)), 0.0) == lost
    assert streams.change(StreamChanges(kept=(StreamEpoch("s", 1),)), 0.0) == lost
    assert streams.change(StreamChanges(dropped=(StreamEpoch("s", 1),)), 0.0) == FINE
    assert streams.change(added(2, 1, epoch=2), 0.0) == FINE
    assert len(entries_of(streams)) == 3


def test_a_new_store_takes_the_highest_epoch(streams: StoredStreams) -> None:
    assert streams.change(added(2, 1, epoch=2), 0.0) == StreamVerdicts(unknown=("s",))
    streams.change(opened(state(epoch=1, num=9)), 0.0)
    assert streams.change(added(3, 1, epoch=2), 0.0) == StreamVerdicts(unknown=("s",))
    assert streams.change(opened(state(epoch=2, num=4)), 0.0) == FINE
    assert streams.change(added(9, 1, epoch=1), 0.0) == StreamVerdicts(taken=("s",))
    assert len(entries_of(streams)) == 4


def test_streams_expire_unless_they_are_kept(streams: StoredStreams) -> None:
    streams.change(opened(state("a"), state("b")), 0.0)
    streams.change(StreamChanges(kept=(StreamEpoch("a", 1),)), KEEP_S - 1)
    assert streams.find("b", KEEP_S - 0.5).epoch == 1
    assert (streams.find("a", KEEP_S).epoch, streams.find("b", KEEP_S).epoch) == (1, 0)
    assert streams.take("b", KEEP_S) is None
    assert streams.find("a", 2 * KEEP_S - 1).epoch == 0
    assert (len(streams), streams.num_bytes) == (0, 0)


def test_a_dropped_stream_is_gone(streams: StoredStreams) -> None:
    streams.change(opened(state(num=3)), 0.0)
    assert streams.change(StreamChanges(dropped=(StreamEpoch("s", 1),)), 0.0) == FINE
    assert (len(streams), streams.num_bytes) == (0, 0)


def test_a_young_store_says_that_it_may_not_know_all(streams: StoredStreams) -> None:
    assert streams.find("s", FILLING_S - 0.1).filling
    assert not streams.find("s", FILLING_S).filling


def test_ended_streams_of_the_same_tenant_give_way_oldest_first() -> None:
    streams = StoredStreams(3 * SIZE, 1000 * SIZE, 0.0)
    streams.change(opened(state("a", ended=True), state("b", ended=True), state("c", tenant="other", ended=True)), 0.0)
    assert streams.change(opened(state("d")), 0.0) == FINE
    assert [streams.find(name, 0.0).epoch for name in "abcd"] == [1, 1, 1, 1]
    assert streams.change(added(0, 1, "d"), 0.0) == FINE
    assert [streams.find(name, 0.0).epoch for name in "abcd"] == [0, 1, 1, 1]
    assert streams.change(added(1, 2, "d"), 0.0) == FINE
    assert [streams.find(name, 0.0).epoch for name in "abcd"] == [0, 0, 1, 1]
    assert streams.change(added(3, 1, "d"), 0.0) == StreamVerdicts(full=("d",))
    assert streams.num_bytes == SIZE


def test_all_tenants_together_are_bounded_and_none_pushes_another_out() -> None:
    streams = StoredStreams(3 * SIZE, 3 * SIZE, 0.0)
    streams.change(opened(state("a", ended=True), state("b", tenant="u"), state("c", tenant="v")), 0.0)
    assert streams.change(opened(state("d", tenant="w")), 0.0) == StreamVerdicts(full=("d",))
    assert streams.change(opened(state("e")), 0.0) == FINE
    assert [streams.find(name, 0.0).epoch for name in "abcde"] == [0, 1, 1, 0, 1]


async def test_the_component_answers_and_shows_what_it_holds() -> None:
    context = component_context("stream-store")
    store = StreamStore(context)
    answer = await store.answer("change", encode(opened(state(num=2))))
    assert decode(answer, StreamVerdicts) == FINE
    assert decode(await store.answer("find", encode(StreamName("s"))), StreamFound).epoch == 1
    assert decode(await store.answer("take", encode(StreamName("s"))), StreamState).epoch == 2
    assert await store.answer("take", encode(StreamName("x"))) == b""
    text = generate_latest(context.registry).decode()
    assert "farsight:resumable_streams 1.0" in text
    assert "farsight:resumable_stream_bytes 230.0" in text
