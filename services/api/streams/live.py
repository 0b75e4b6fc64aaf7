"""One resumable stream at the ingress replica that runs it: its log, and the client that reads it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

from farsight.core.codec import decode, encode
from farsight.core.errors import CapacityError
from farsight.core.messages.resumable import END, StreamEntries, StreamEntry, StreamEpoch, StreamState
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Request
from farsight.services.api.answers.sse import DONE, AnswerEvents, ChunkWriter, event
from farsight.services.api.backend import Generator
from farsight.services.api.errors import ApiError, as_api_error
from farsight.services.api.fields import shown
from farsight.services.api.generate import run_requests
from farsight.services.api.generation import Generation
from farsight.services.api.text.dialect import TokenTexts

EVENT_ID = re.compile(r"([0-9a-f]{32})-([1-9][0-9]{0,14})")

ENTRIES_PER_TURN = 256
"""Entries of a log that are decoded or written in one turn of the event loop: some 5 ms."""


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """What is needed to run a stream and to write its events.

    Attributes:
        generation: Without prompts, which its requests hold.
        created: Unix seconds, as each event says.
    """

    generation: Generation
    created: int


def record_of(generation: Generation) -> bytes:
    return encode(StreamRecord(dataclasses.replace(generation, prompts=()), int(time.time())))


def generation_in(record: bytes) -> Generation:
    """The generation of a record, with its prompts."""
    generation = decode(record, StreamRecord).generation
    return dataclasses.replace(generation, prompts=generation.requests[:: generation.num_tries])


class EventWriter:
    """Turns the log of a stream into events with ids: the same log gives the same events at every replica.

    Args:
        record: As ``record_of`` made it.
        texts: As for ``ChunkWriter``.
    """

    def __init__(self, stream_id: str, record: bytes, texts: TokenTexts) -> None:
        self.num_events = 0
        generation = generation_in(record)
        self._stream_id = stream_id
        self._events = AnswerEvents(generation, ChunkWriter(generation, texts, decode(record, StreamRecord).created))

    def write(self, entry: StreamEntry) -> list[bytes]:
        """Writes the events of the next entry."""
        if entry.delta is not None:
            data = self._events.output(entry.index, entry.delta)
        else:
            data = event(json.loads(entry.error)) + DONE if entry.error else self._events.end()
        return [self._numbered(each) for each in data.split(b"\n\n") if each]

    def failure(self, error: ApiError) -> bytes:
        """Writes an error without an id: the stream holds no such event."""
        return event(error.body())

    def _numbered(self, data: bytes) -> bytes:
        self.num_events += 1
        return b"id: %s-%d\n%s\n\n" % (self._stream_id.encode(), self.num_events, data)


@dataclass(frozen=True, slots=True)
class _Position:
    """How far a reader has caught up: entries that it has written, and the events that its client lacks."""

    num_entries: int
    events: list[bytes]


def _nothing() -> None:
    """Stands for a listener that is not there yet."""


@dataclass(slots=True)
class LiveStream:
    """The log of a stream and what this replica does with it.

    An entry is shown to clients once the store has it: what a client has seen, every successor knows.

    Attributes:
        state: Without entries.
        entries: From the first; the last one may be ``END``.
        num_stored: Entries that the store has.
        is_known: Whether the store was told of the stream.
        is_buffered: False once the store has dropped it for want of room: it goes on, but cannot be resumed.
        failure: Why it cannot run now; readers raise it.
        reader: Number of the reader that the stream belongs to; a new one ends the one before.
        num_readers: Readers that are connected.
        is_shown: Whether a client has got the headers of the answer, and so the stream's id.
        changed: Called when there is something for the store.
    """

    state: StreamState
    entries: list[StreamEntry] = field(default_factory=list)
    num_stored: int = 0
    is_known: bool = False
    is_buffered: bool = True
    failure: Exception | None = None
    reader: int = 0
    num_readers: int = 0
    is_shown: bool = False
    changed: Callable[[], None] = _nothing
    runner: asyncio.Task[None] | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def taken(cls, state: StreamState) -> LiveStream:
        """From a store that keeps all of it; a long log is decoded in turns of the event loop."""
        entries = []
        for number, entry in enumerate(state.entries):
            entries.append(decode(entry, StreamEntry))
            if number % ENTRIES_PER_TURN == 0:
                await asyncio.sleep(0)
        head = dataclasses.replace(state, entries=(), ended=False)
        return cls(head, entries, num_stored=len(entries), is_known=True, is_shown=True)

    @property
    def ended(self) -> bool:
        return bool(self.entries) and self.entries[-1].index == END

    @property
    def runs(self) -> bool:
        """Whether its requests are in flight."""
        return self.runner is not None and not self.runner.done()

    @property
    def epoch(self) -> StreamEpoch:
        return StreamEpoch(self.state.stream_id, self.state.epoch)

    def add(self, entry: StreamEntry) -> None:
        self.entries.append(entry)
        self.changed()
        if not self.is_buffered:
            self._tell()

    def whole(self) -> StreamState:
        """All of it, for a store that does not know it."""
        entries = tuple(encode(entry) for entry in self.entries)
        return dataclasses.replace(self.state, entries=entries, ended=self.ended)

    def unstored(self) -> StreamEntries:
        fresh = tuple(encode(entry) for entry in self.entries[self.num_stored :])
        return StreamEntries(self.state.stream_id, self.state.epoch, self.num_stored, fresh, self.ended)

    def stored(self, num: int) -> None:
        """The store has so many entries."""
        self.is_known = True
        if num > self.num_stored:
            self.num_stored = num
            self._tell()

    def show(self) -> bool:
        """Notes that a client learns of the stream; returns False, and notes nothing, while the store does not know it.

        A client that has the id may ask any replica for the stream, and another replica has it from the store alone.
        """
        if not self.is_known:
            return False
        self.is_shown = True
        return True

    def unbuffered(self) -> None:
        """Heeds that the store has no room: a stream of which no client knows is refused, another one loses its log."""
        if not (self.num_stored or self.is_shown):
            message = "the bytes of resumable streams that are kept for you have reached their limit"
            self.fail(CapacityError(message, 1.0))
        else:
            self.is_buffered = False
            self._tell()

    def fail(self, failure: Exception) -> None:
        """Ends the readers with an error; the log stays as it is."""
        self.failure = failure
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def read(self, after: int, writer: EventWriter) -> AsyncGenerator[bytes, None]:
        """The events behind number ``after``, until the last. A later reader ends this one.

        Raises:
            ApiError: 400: no client can have seen an event of that number.
            Exception: ``failure``, before the first event. Later it becomes an event, without an id.
        """
        began = await self._catch_up(after, writer)
        self.reader += 1
        self.num_readers += 1
        self._tell()
        self.changed()
        try:
            async with aclosing(self._read(self.reader, began, writer)) as events:
                async for data in events:
                    yield data
        finally:
            self.num_readers -= 1
            self.changed()

    @property
    def _shown(self) -> int:
        """Entries that clients may see."""
        return self.num_stored if self.is_buffered else len(self.entries)

    async def _catch_up(self, after: int, writer: EventWriter) -> _Position:
        """Writes what is there already; a long log in turns of the event loop."""
        unseen: list[bytes] = []
        num_entries = 0
        while num_entries < self._shown:
            for entry in self.entries[num_entries : min(self._shown, num_entries + ENTRIES_PER_TURN)]:
                events = writer.write(entry)
                num_entries += 1
                if writer.num_events > after:
                    unseen += events[max(0, len(events) - (writer.num_events - after)) :]
            await asyncio.sleep(0)
        if after > writer.num_events:
            raise _wrong_event(f"number {after}", f"a number up to {writer.num_events}, the last one sent")
        return _Position(num_entries, unseen)

    async def _read(self, number: int, began: _Position, writer: EventWriter) -> AsyncGenerator[bytes, None]:
        position, events = began.num_entries, began.events
        has_sent = False
        while True:
            news = self._news
            if self.reader != number:
                yield writer.failure(superseded())
                return
            fresh = self.entries[position : self._shown]
            position += len(fresh)
            events += [each for entry in fresh for each in writer.write(entry)]
            if events:
                has_sent = self.is_shown = True
                yield b"".join(events)
                events = []
            if self.ended and position == len(self.entries):
                return
            if self.failure is not None:
                if not has_sent:
                    raise self.failure
                yield writer.failure(as_api_error(self.failure))
                return
            if position == self._shown:
                await news.wait()

    async def run(self, backend: Generator, generation: Generation) -> None:
        """Runs what is left of the requests and writes the log to its end.

        A refusal before anything new has come is a ``failure`` that says nothing of the stream: a client may come back.
        """
        num_before = len(self.entries)
        try:
            await self._run(backend, generation)
            end = StreamEntry(END)
        except Exception as error:
            refused = isinstance(error, CapacityError) or not self.is_shown
            if refused and len(self.entries) == num_before:
                self.fail(error)
                return
            end = StreamEntry(END, error=json.dumps(as_api_error(error).body()))
        self.add(end)

    async def _run(self, backend: Generator, generation: Generation) -> None:
        rest = [index for index, ended in enumerate(self._ended_choices(generation)) if not ended]
        if not rest:
            return
        requests = tuple(self._continued(index, generation.requests[index]) for index in rest)
        texts = tuple(generation.texts[index // generation.num_tries] for index in rest)
        running = dataclasses.replace(generation, requests=requests, texts=texts, num_tries=1)
        async with aclosing(run_requests(backend, running)) as deltas:
            async for number, delta in deltas:
                self.add(StreamEntry(rest[number], dataclasses.replace(delta, request_id="", attempt=0)))

    def _ended_choices(self, generation: Generation) -> list[bool]:
        ended = [False] * len(generation.requests)
        for index, delta in self._deltas():
            ended[index] = ended[index] or delta.finish_reason is not None
        return ended

    def _continued(self, index: int, request: Request) -> Request:
        """The request with its output so far, which the worker prefills.

        Raises:
            ApiError: Another server has begun the answer, and only it knows the tokens.
        """
        deltas = [delta for choice, delta in self._deltas() if choice == index]
        if any(delta.num_unnamed for delta in deltas):
            message = "The replica that ran this answer is another server; its answer cannot be continued."
            raise ApiError(message, status=503, code="generation_failed")
        output_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
        return dataclasses.replace(request, output_ids=output_ids)

    def _deltas(self) -> Iterator[tuple[int, TokenDelta]]:
        return ((entry.index, entry.delta) for entry in self.entries if entry.delta is not None)


def events_seen(stream_id: str, last_event_id: str) -> int:
    """The number in a ``Last-Event-ID`` header; 0 without one.

    Raises:
        ApiError: 400: it is no id of an event of this stream.
    """
    if not last_event_id:
        return 0
    found = EVENT_ID.fullmatch(last_event_id)
    if found is None or found[1] != stream_id:
        raise _wrong_event(repr(shown(last_event_id)), f"the id of an event of this stream, {stream_id}-NUMBER")
    return int(found[2])


def _wrong_event(found: str, expected: str) -> ApiError:
    message = f"Last-Event-ID: got {found}, expected {expected}"
    return ApiError(message, param="Last-Event-ID", code="invalid_value")


def superseded() -> ApiError:
    """What a reader is told that another one has replaced."""
    message = "Another connection reads this stream now."
    return ApiError(message, status=409, code="stream_superseded")
