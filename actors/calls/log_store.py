"""What the LogStore and the StreamStore answer."""

from __future__ import annotations

from typing import Protocol

from actors.calls.message import message
from core.kept import (
    AddParts,
    DropExpired,
    ObjectName,
    ObjectPage,
    ObjectQuery,
    ObjectReply,
    PartsPage,
    PartsQuery,
    PutObject,
    PutVerdict,
)
from core.messages.log import (
    Artefact,
    ArtefactList,
    ArtefactName,
    ArtefactReply,
    BatchPage,
    ExamplePage,
    FinishedBatches,
    FinishedRequests,
    ForecastRecords,
    LogPage,
    LogQuery,
    RequestTraces,
    TraceQuery,
)
from core.messages.resumable import StreamChanges, StreamFound, StreamName, StreamState, StreamVerdicts


class LogStoreCalls(Protocol):
    """Every method raises FarsightError while the log cannot be had; then the message may be repeated."""

    @message()
    async def append(self, finished: FinishedRequests) -> None:
        """Answers when they are on disk."""

    @message()
    async def append_forecasts(self, forecasts: ForecastRecords) -> None:
        """Answers when they are on disk."""

    @message()
    async def append_batches(self, batches: FinishedBatches) -> None:
        """Answers when they are on disk."""

    @message()
    async def append_traces(self, traces: RequestTraces) -> None:
        """Answers when they are on disk."""

    @message()
    async def read(self, query: LogQuery) -> LogPage:
        """Finished requests after a row."""

    @message()
    async def read_examples(self, query: LogQuery) -> ExamplePage:
        """Requests with the forecast that was made for them; rows count examples."""

    @message()
    async def read_batches(self, query: LogQuery) -> BatchPage:
        """Finished batches after a row; rows count batches."""

    @message()
    async def read_traces(self, query: TraceQuery) -> RequestTraces:
        """The decisions behind one answer; none for an answer that is not known."""

    @message()
    async def put_artefact(self, artefact: Artefact) -> None:
        """Keeps a version; it is not current by that. Raises MessageError if its version is not above all others."""

    @message()
    async def set_current(self, name: ArtefactName) -> None:
        """That version, and no other of its kind, is current. Raises MessageError for one that is not kept."""

    @message()
    async def read_artefact(self, name: ArtefactName) -> ArtefactReply:
        """A version, by default the current one."""

    @message()
    async def artefacts(self) -> ArtefactList:
        """All versions that are kept, without their data."""

    @message()
    async def put_object(self, order: PutObject) -> PutVerdict:
        """Keeps a new object, or the next revision of one."""

    @message()
    async def find_object(self, name: ObjectName) -> ObjectReply:
        """A kept object, without its parts."""

    @message()
    async def list_objects(self, query: ObjectQuery) -> ObjectPage:
        """Kept objects of one owner."""

    @message()
    async def drop_object(self, name: ObjectName) -> ObjectPage:
        """Drops an object with its parts; answers what it was, or nothing if it was not there."""

    @message()
    async def add_parts(self, order: AddParts) -> None:
        """Adds parts of an object; answers when they are on disk."""

    @message()
    async def read_parts(self, query: PartsQuery) -> PartsPage:
        """Parts of an object, from one on."""

    @message()
    async def drop_expired(self, order: DropExpired) -> None:
        """Drops every kept object whose time is over."""


class StreamStoreCalls(Protocol):
    """The StreamStore."""

    @message()
    async def change(self, changes: StreamChanges) -> StreamVerdicts:
        """Writes down what an ingress replica tells of the streams that it runs."""

    @message()
    async def find(self, name: StreamName) -> StreamFound:
        """Whether a stream is known, and whose it is."""

    @message()
    async def take(self, name: StreamName) -> StreamState | None:
        """The whole stream, for the ingress replica that runs it from now on; nothing if it is not known."""
