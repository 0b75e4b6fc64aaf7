"""Messages to the LogStore and the StreamStore."""

from __future__ import annotations

from typing import Protocol

from farsight.actors.calls.message import message
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
from farsight.core.messages.resumable import StreamChanges, StreamFound, StreamName, StreamState, StreamVerdicts


class LogStoreCalls(Protocol):
    """Every method raises FarsightError while the log is unavailable; the sender may then repeat the message."""

    @message()
    async def append(self, new: LogRecords) -> None:
        """Appends records; returns when they are on disk."""

    @message()
    async def read(self, query: LogQuery) -> LogPage:
        """Returns the finished requests after the row of the query."""

    @message()
    async def read_examples(self, query: LogQuery) -> ExamplePage:
        """Returns finished requests, each with the forecast made for it; the row numbers count these examples."""

    @message()
    async def read_batches(self, query: LogQuery) -> BatchPage:
        """Returns the finished batches after the row of the query; the row numbers count batches."""

    @message()
    async def read_traces(self, query: TraceQuery) -> RequestTraces:
        """Returns the decisions behind one response; none if the log does not know the response."""

    @message()
    async def put_artefact(self, artefact: Artefact) -> None:
        """Stores an artefact without making it current. Raises MessageError unless its version is the highest."""

    @message()
    async def set_current(self, name: ArtefactName) -> None:
        """Makes a version the only current one of its kind. Raises MessageError if that version is not stored."""

    @message()
    async def read_artefact(self, name: ArtefactName) -> Artefact | None:
        """Returns one version of an artefact, by default the current version; None if it is not stored."""

    @message()
    async def artefacts(self) -> ArtefactList:
        """Returns all stored versions without their data."""

    @message()
    async def put_object(self, order: PutObject) -> PutVerdict:
        """Stores a new object or the next revision of an object."""

    @message()
    async def find_object(self, name: ObjectName) -> KeptObject | None:
        """Returns a kept object without its parts; None if it is not there."""

    @message()
    async def list_objects(self, query: ObjectQuery) -> ObjectPage:
        """Returns the kept objects of one owner."""

    @message()
    async def drop_object(self, name: ObjectName) -> None:
        """Drops an object with its parts; does nothing if there is none."""

    @message()
    async def add_parts(self, order: AddParts) -> None:
        """Adds parts of an object; returns when they are on disk."""

    @message()
    async def read_parts(self, query: PartsQuery) -> PartsPage:
        """Returns parts of an object, beginning with the part that the query names."""

    @message()
    async def drop_expired(self, order: DropExpired) -> None:
        """Drops every kept object that has expired."""


class StreamStoreCalls(Protocol):
    """The StreamStore."""

    @message()
    async def change(self, changes: StreamChanges) -> StreamVerdicts:
        """Stores what an ingress replica reports about the streams that it runs."""

    @message()
    async def find(self, name: StreamName) -> StreamFound:
        """Returns whether a stream is known, and its owner."""

    @message()
    async def take(self, name: StreamName) -> StreamState | None:
        """Hands a whole stream to the ingress replica that continues it; returns None if the stream is unknown."""
