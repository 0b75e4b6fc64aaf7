"""Runs the resumable streams of one ingress replica, and writes their logs to the store before clients see them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable

from farsight.actors.calls.log_store import StreamStoreCalls
from farsight.core.errors import FarsightError
from farsight.core.messages.resumable import StreamChanges, StreamFound, StreamName, StreamState, StreamVerdicts
from farsight.services.api.access.keys import owner_of, owns
from farsight.services.api.backend import Generator
from farsight.services.api.errors import ApiError, unavailable
from farsight.services.api.generation import Generation
from farsight.services.api.streams.live import LiveStream, generation_in, record_of, superseded

RESUME_S = 60.0
"""How long a stream waits for a client after the last one has gone; then its requests end and its log is dropped."""

KEEP_S = 1.0
"""How often the store hears of streams without news; a new store then learns of them."""

ENTRIES_PER_MESSAGE = 4096
"""A new store is told of whole streams in messages of about so many entries, each encoded in some 15 ms."""

RETRY_S = 0.05
"""Pause before the store is looked for again."""

_NOT_NOW = "The streams cannot be looked up now."

logger = logging.getLogger(__name__)


Hold = Callable[[], Callable[[], None]]
"""Counts a request in flight whose client is gone; what it returns ends the count."""


def _nothing() -> None:
    """Ends a count that there is not."""


def hold_nothing() -> Callable[[], None]:
    """For a service that counts nothing."""
    return _nothing


class _Unattended:
    """What ends once a client reads the stream again, or it is let go."""

    def __init__(self, expiry: asyncio.TimerHandle, release: Callable[[], None]) -> None:
        self._expiry = expiry
        self._release = release

    def end(self) -> None:
        self._expiry.cancel()
        self.has_run()

    def has_run(self) -> None:
        """The stream has come to its end: nothing is in flight for it."""
        self._release()
        self._release = _nothing


class StreamManager:
    """The streams that this ingress replica runs.

    Args:
        store: Outlives this process.
        resume_s: As ``RESUME_S``.
    """

    def __init__(self, store: StreamStoreCalls, resume_s: float = RESUME_S) -> None:
        self._store = store
        self._resume_s = resume_s
        self._streams: dict[str, LiveStream] = {}
        self._holds: dict[str, Hold] = {}
        self._unattended: dict[str, _Unattended] = {}
        self._dropped: dict[str, LiveStream] = {}
        self._due = asyncio.Event()
        self._taking = asyncio.Lock()
        self._kept_at = 0.0

    def __len__(self) -> int:
        return len(self._streams)

    def start(
        self, backend: Generator, generation: Generation, identity: str, tenant: str, hold: Hold = hold_nothing
    ) -> LiveStream:
        """Begins to run a new stream.

        Args:
            identity: Identity of the key that may read it; empty where none was sent: who knows the id may read it.
            tenant: Its bound of bytes applies.
        """
        stream_id = secrets.token_hex(16)
        live = LiveStream(StreamState(stream_id, 1, tenant, owner_of(identity), record_of(generation)))
        self._run(live, backend, generation, hold)
        return live

    async def resume(self, stream_id: str, identity: str, backend: Generator, hold: Hold = hold_nothing) -> LiveStream:
        """The stream, which is run here from now on.

        Raises:
            ApiError: 404: no stream of this key has that id; 503: the store cannot be asked now.
        """
        async with self._taking:
            live = self._streams.get(stream_id)
            if live is not None and not owns(identity, live.state.owner):
                raise _unknown(stream_id)
            try:
                found = await self._store.find(StreamName(stream_id))
                if live is not None and found.epoch <= live.state.epoch and live.failure is None:
                    return live
                taken = await self._take(stream_id, identity, found)
            except FarsightError as error:
                if live is None:
                    raise unavailable(_NOT_NOW) from error
                return live
            if live is not None:
                self._lose(live)
            self._run(taken, backend, generation_in(taken.state.record), hold)
            return taken

    async def _take(self, stream_id: str, identity: str, found: StreamFound) -> LiveStream:
        if not found.epoch:
            raise unavailable(_NOT_NOW) if found.filling else _unknown(stream_id)
        if not owns(identity, found.owner):
            raise _unknown(stream_id)
        state = await self._store.take(StreamName(stream_id))
        if state is None:
            raise _unknown(stream_id)
        return await LiveStream.taken(state)

    def _run(self, live: LiveStream, backend: Generator, generation: Generation, hold: Hold) -> None:
        stream_id = live.state.stream_id
        self._streams[stream_id] = live
        self._holds[stream_id] = hold
        live.changed = lambda: self._changed(live)
        if not live.ended:
            live.runner = asyncio.create_task(live.run(backend, generation))
            live.runner.add_done_callback(lambda _: self._changed(live))
        self._wait_for_client(live)
        self._due.set()

    def _changed(self, live: LiveStream) -> None:
        """It has news for the store, its reader has come or gone, or it has come to its end."""
        self._due.set()
        if not self._runs(live):
            return
        stream_id = live.state.stream_id
        unattended = self._unattended.get(stream_id)
        if unattended is None:
            if not live.num_readers:
                self._left(live)
        elif live.num_readers:
            del self._unattended[stream_id]
            unattended.end()
        elif not live.runs:
            unattended.has_run()

    def _left(self, live: LiveStream) -> None:
        """Waits for the client to come back; one that has not got the headers does not know the id and cannot."""
        if live.is_buffered and live.is_shown and live.failure is None:
            self._wait_for_client(live)
        else:
            self._let_go(live)

    def _wait_for_client(self, live: LiveStream) -> None:
        expiry = asyncio.get_running_loop().call_later(self._resume_s, self._let_go, live)
        release = self._holds[live.state.stream_id]() if live.runs else _nothing
        self._unattended[live.state.stream_id] = _Unattended(expiry, release)

    def _let_go(self, live: LiveStream) -> None:
        """Ends the stream here. One that was refused and whose id a client knows stays in the store for a later try."""
        self._lose(live)
        if live.is_buffered and (live.failure is None or not live.is_shown):
            self._dropped[live.state.stream_id] = live
            self._due.set()

    def _lose(self, live: LiveStream) -> None:
        """It is not run here any more."""
        if not self._runs(live):
            return
        stream_id = live.state.stream_id
        del self._streams[stream_id], self._holds[stream_id]
        unattended = self._unattended.pop(stream_id, None)
        if unattended is not None:
            unattended.end()
        if live.runner is not None:
            live.runner.cancel()

    async def run(self) -> None:
        """Tells the store what has come, one message at a time; never returns."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEEP_S):
                    await self._due.wait()
            self._due.clear()
            try:
                await self._tell()
            except FarsightError:
                self._due.set()
                await asyncio.sleep(RETRY_S)

    async def _tell(self) -> None:
        streams = [live for live in self._streams.values() if live.is_buffered]
        fresh = [live for live in streams if live.is_known and live.num_stored < len(live.entries)]
        fresh += self._first_unknown(streams)
        counts = [len(live.entries) for live in fresh]
        kept = self._due_to_keep(streams)
        dropped, self._dropped = self._dropped, {}
        changes = StreamChanges(
            tuple(live.whole() for live in fresh if not live.is_known),
            tuple(live.unstored() for live in fresh if live.is_known),
            tuple(live.epoch for live in kept),
            tuple(live.epoch for live in dropped.values()),
        )
        if changes == StreamChanges():
            return
        verdicts = await self._store.change(changes)
        untold = {*verdicts.unknown, *verdicts.taken, *verdicts.full}
        for live, count in zip(fresh, counts, strict=True):
            if live.state.stream_id not in untold:
                live.stored(count)
        # A stream may have been taken back meanwhile: the verdict is about what the store was told of.
        self._heed(verdicts, {live.state.stream_id: live for live in (*fresh, *kept) if self._runs(live)})

    def _first_unknown(self, streams: list[LiveStream]) -> list[LiveStream]:
        """As many of those that the store must be told of as a message may hold, but one at least."""
        found: list[LiveStream] = []
        num_entries = 0
        for live in streams:
            if live.is_known:
                continue
            num_entries += len(live.entries)
            if found and num_entries > ENTRIES_PER_MESSAGE:
                self._due.set()
                break
            found.append(live)
        return found

    def _due_to_keep(self, streams: list[LiveStream]) -> list[LiveStream]:
        """Once each ``KEEP_S``, the streams without news."""
        now = asyncio.get_running_loop().time()
        if now - self._kept_at < KEEP_S:
            return []
        self._kept_at = now
        return [live for live in streams if live.is_known and live.num_stored == len(live.entries)]

    def _heed(self, verdicts: StreamVerdicts, told: dict[str, LiveStream]) -> None:
        for live in (told[stream_id] for stream_id in verdicts.unknown if stream_id in told):
            live.is_known = False
            self._due.set()
        for live in (told[stream_id] for stream_id in verdicts.taken if stream_id in told):
            self._lose(live)
            live.fail(superseded())
        for live in (told[stream_id] for stream_id in verdicts.full if stream_id in told):
            logger.warning("a resumable stream goes on without its log: there is no room for more")
            live.unbuffered()

    def _runs(self, live: LiveStream) -> bool:
        return self._streams.get(live.state.stream_id) is live


def _unknown(stream_id: str) -> ApiError:
    message = (
        f"There is no stream {stream_id} of this key; a stream is kept for {RESUME_S:.0f} s after its client has gone."
    )
    return ApiError(message, status=404, code="stream_not_found")
