"""The log of finished requests, forecasts, traces and learned artefacts; it loses nothing that it has acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from prometheus_client import Counter, Gauge

from farsight.actors.calls.log_store import LogStoreCalls
from farsight.actors.log.log_backend import RECORD_KINDS, LogBackend, Record, Retention, check_integers
from farsight.actors.log.log_sqlite import SqliteLog
from farsight.actors.runtime.component import Component, ComponentContext
from farsight.actors.runtime.metrics import family
from farsight.actors.runtime.names import RUN_DIR_VARIABLE
from farsight.core.errors import ConfigError, FarsightError, MessageError
from farsight.core.kept import (
    AddParts,
    DropExpired,
    KeptObject,
    ObjectName,
    ObjectPage,
    ObjectQuery,
    PartsPage,
    PartsQuery,
    PutObject,
    PutVerdict,
)
from farsight.core.messages.log import (
    Artefact,
    ArtefactList,
    ArtefactName,
    BatchPage,
    ExamplePage,
    LogPage,
    LogQuery,
    LogRecords,
    RequestTraces,
    TraceQuery,
)
from farsight.core.messages.status import LOG_READ, LOG_WRITE

logger = logging.getLogger(__name__)

FILE_NAME = "farsight-log.sqlite"

MAX_PAGE = 10_000
"""Most records in one page, whatever the query's limit."""

MAX_EXAMPLES = 250
"""Most examples in one ``ExamplePage``: decoding and encoding this many blocks the event loop for about 6 ms."""

MAX_OBJECTS = 1000
"""Most kept objects in one page."""

MAX_COMMIT = 10_000
"""A commit takes no further message once it has so many records."""


class LogStore(Component, LogStoreCalls):
    """Writes records of served requests and artefacts learned from them, and serves them to the learners.

    One task writes: messages that arrive during a commit go into the next commit together, so that many ingress
    replicas share one sync to disk. Records are identified by their ids and artefacts by their versions: a message
    whose answer was lost may be repeated and changes nothing.

    Every method raises MessageError for a malformed message, and FarsightError when the storage fails or the store is
    closed. After an error nothing of the message is known to be written, and the sender may repeat it.
    """

    kind = "LogStore"

    def __init__(self, context: ComponentContext) -> None:
        super().__init__(context)
        self._private_dir: str | None = None
        self._backend: LogBackend | None = None
        self._inbox: asyncio.Queue[tuple[Sequence[Record], asyncio.Future[None]]] = asyncio.Queue()
        self._closing = False
        self._queue = 0
        self._written_at: float | None = None
        self._num_written = self._num_commits = 0
        text = "Records written to the log, by kind."
        self._num_records = family(context.registry, Counter, "farsight:log_records", text, ("kind",))
        text = "Size of the log file in bytes; 0 for a log on Redis."
        self._num_bytes = family(context.registry, Gauge, "farsight:log_bytes", text)

    async def start(self) -> None:
        """Opens or creates the log.

        Raises:
            ConfigError: The log cannot be opened, or is not a log of this version or an earlier one.
        """
        backend = self._make_backend()
        await backend.open()
        self._backend = backend
        self.spawn(self._write())

    async def stop(self) -> None:
        """Writes the records received so far and closes the log."""
        self._closing = True
        await self._inbox.join()
        await super().stop()
        if self._backend is not None:
            await self._backend.close()
            self._backend = None
        if self._private_dir is not None:
            shutil.rmtree(self._private_dir, ignore_errors=True)

    @property
    def queue(self) -> int:
        return self._queue

    @property
    def last_step_age_s(self) -> float | None:
        return None if self._written_at is None else time.monotonic() - self._written_at

    @property
    def work_done(self) -> Mapping[str, float]:
        return {"records written": self._num_written, "commits": self._num_commits}

    async def append(self, new: LogRecords) -> None:
        records: list[Record] = []
        for kind in RECORD_KINDS.values():
            for i, record in enumerate(getattr(new, kind)):
                check_integers(record, f"LogRecords.{kind}[{i}]")
                records.append(record)
        if self._backend is None or self._closing:
            raise FarsightError(f"{self.name} is closed")
        if records:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._inbox.put_nowait((records, done))
            self._queue += len(records)
            await done

    async def read(self, query: LogQuery) -> LogPage:
        """Returns at most ``MAX_PAGE`` records.

        Without records after ``after_row``, ``last_row`` is ``after_row``, but at most the last row ever written. So a
        reader that is ahead of the log notices that the log was replaced, and a query after row ``2**63 - 1`` returns
        the end of the log.
        """
        with self._open("read") as backend:
            return await backend.read_requests(_limited(query, MAX_PAGE))

    async def read_examples(self, query: LogQuery) -> ExamplePage:
        """Returns at most ``MAX_EXAMPLES`` examples."""
        with self._open("read") as backend:
            return await backend.read_examples(_limited(query, MAX_EXAMPLES))

    async def read_batches(self, query: LogQuery) -> BatchPage:
        """Returns at most ``MAX_PAGE`` records."""
        with self._open("read") as backend:
            return await backend.read_batches(_limited(query, MAX_PAGE))

    async def read_traces(self, query: TraceQuery) -> RequestTraces:
        with self._open("read") as backend:
            return RequestTraces(await backend.read_traces(query.response_id))

    async def put_artefact(self, artefact: Artefact) -> None:
        check_integers(artefact, "Artefact")
        with self._open("write") as backend:
            if await backend.put_artefact(artefact):
                await self._note({"artefacts": 1}, backend)

    async def set_current(self, name: ArtefactName) -> None:
        if name.version is None:
            raise MessageError("ArtefactName.version", None, "a version")
        with self._open("write") as backend:
            await backend.set_current(name.kind, name.version)

    async def read_artefact(self, name: ArtefactName) -> Artefact | None:
        with self._open("read") as backend:
            return await backend.artefact(name.kind, name.version)

    async def artefacts(self) -> ArtefactList:
        with self._open("read") as backend:
            return ArtefactList(await backend.artefacts())

    async def put_object(self, order: PutObject) -> PutVerdict:
        with self._open("write") as backend:
            return await backend.kept.put(order)

    async def find_object(self, name: ObjectName) -> KeptObject | None:
        with self._open("read") as backend:
            return await backend.kept.find(name)

    async def list_objects(self, query: ObjectQuery) -> ObjectPage:
        limited = dataclasses.replace(query, limit=min(max(query.limit, 0), MAX_OBJECTS))
        with self._open("read") as backend:
            return ObjectPage(await backend.kept.list(limited))

    async def drop_object(self, name: ObjectName) -> None:
        with self._open("write") as backend:
            await backend.kept.drop(name)

    async def add_parts(self, order: AddParts) -> None:
        with self._open("write") as backend:
            await backend.kept.add_parts(order)

    async def read_parts(self, query: PartsQuery) -> PartsPage:
        with self._open("read") as backend:
            return PartsPage(await backend.kept.parts(query))

    async def drop_expired(self, order: DropExpired) -> None:
        with self._open("write") as backend:
            await backend.kept.drop_expired(order.now)

    def _make_backend(self) -> LogBackend:
        log = self.context.config.log
        retention = Retention(log.max_rows, log.max_artefacts)
        if not log.on_redis:
            return SqliteLog(self._path(), retention)
        try:
            from farsight.actors.log.log_redis import RedisLog
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "redis":
                raise
            expected = "a file, or the extra 'redis' installed: pip install 'farsight[redis]'"
            raise ConfigError("log.path", log.path.partition("://")[0] + "://", expected) from error
        # At the first start an absent server is a configuration error; later it is an outage that the service survives.
        return RedisLog(log.path, retention, patient=self.context.restarts > 0)

    def _path(self) -> Path:
        if self.context.config.log.path:
            return Path(self.context.config.log.path)
        directory = os.environ.get(RUN_DIR_VARIABLE)
        if not directory:
            directory = self._private_dir = tempfile.mkdtemp(prefix="farsight-")
        return Path(directory) / FILE_NAME

    @contextlib.contextmanager
    def _open(self, verb: str) -> Iterator[LogBackend]:
        """Yields the backend; raises its errors as FarsightError."""
        if self._backend is None or self._closing:
            raise FarsightError(f"{self.name} is closed")
        with self._telling(verb, self._backend):
            yield self._backend

    @contextlib.contextmanager
    def _telling(self, verb: str, backend: LogBackend) -> Iterator[None]:
        cause = LOG_WRITE if verb == "write" else LOG_READ
        try:
            yield
        except backend.errors as error:
            self.context.degraded.note(cause, f"cannot {verb} the log: {error}")
            raise FarsightError(f"{self.name} cannot {verb}: {error}") from error
        self.context.degraded.clear(cause)

    async def _write(self) -> None:
        """Commits the waiting messages together; never returns."""
        while True:
            batch = [await self._inbox.get()]
            num_records = len(batch[0][0])
            while num_records < MAX_COMMIT and not self._inbox.empty():
                batch.append(self._inbox.get_nowait())
                num_records += len(batch[-1][0])
            failure: str | None = None
            try:
                await self._commit([record for records, _ in batch for record in records])
            except Exception as error:  # after any error the writer goes on, and every waiting sender gets the error
                failure = str(error)
            for records, done in batch:
                self._queue -= len(records)
                self._inbox.task_done()
                if done.done():  # its caller has been cancelled
                    continue
                if failure is None:
                    done.set_result(None)
                else:
                    done.set_exception(FarsightError(failure))

    async def _commit(self, records: Sequence[Record]) -> None:
        assert self._backend is not None
        began = time.monotonic()
        with self._telling("write", self._backend):
            added = await self._backend.write(records)
        self._num_written += len(records)
        self._num_commits += 1
        self.note("committed", num_records=len(records), took_s=time.monotonic() - began)
        await self._note(added, self._backend)

    async def _note(self, added: dict[str, int], backend: LogBackend) -> None:
        """Updates the metrics; a failure to read the size does not fail the commit."""
        self._written_at = time.monotonic()
        for kind, count in added.items():
            self._num_records.labels(kind).inc(count)
        with contextlib.suppress(*backend.errors):
            num_bytes = await backend.num_bytes()
            if num_bytes is not None:
                self._num_bytes.set(num_bytes)


def _limited(query: LogQuery, max_limit: int) -> LogQuery:
    return LogQuery(query.after_row, min(max(query.limit, 0), max_limit))
