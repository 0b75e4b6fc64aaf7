"""The interfaces of the storage backends of the log store: records, and kept objects beside them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from farsight.core.errors import MessageError
from farsight.core.kept import (
    AddParts,
    KeptObject,
    ObjectName,
    ObjectPart,
    ObjectQuery,
    PartsQuery,
    PutObject,
    PutVerdict,
)
from farsight.core.messages.log import (
    Artefact,
    ArtefactInfo,
    BatchPage,
    ExamplePage,
    FinishedBatch,
    FinishedRequest,
    ForecastRecord,
    LogPage,
    LogQuery,
    RequestTrace,
)


class KeptBackend(Protocol):
    """Every operation takes effect as a whole or not at all, and is durable when it returns."""

    async def put(self, order: PutObject) -> PutVerdict:
        """Stores an object or its next revision."""

    async def find(self, name: ObjectName) -> KeptObject | None: ...

    async def list(self, query: ObjectQuery) -> tuple[KeptObject, ...]: ...

    async def drop(self, name: ObjectName) -> bool:
        """Drops an object with its parts; returns whether the object was there."""

    async def add_parts(self, order: AddParts) -> None: ...

    async def parts(self, query: PartsQuery) -> tuple[ObjectPart, ...]: ...

    async def drop_expired(self, now: float) -> None: ...


MAX_INDICES = 1_000_000
"""Most parts of one page without data."""


def within(rows: list[tuple[int, bytes]], max_bytes: int) -> tuple[ObjectPart, ...]:
    """Returns the first parts that together have at most ``max_bytes``; at least one part if there is any."""
    found: list[ObjectPart] = []
    total = 0
    for index, data in rows:
        total += len(data)
        if found and total > max_bytes:
            break
        found.append(ObjectPart(index, data))
    return tuple(found)


Record = FinishedRequest | ForecastRecord | FinishedBatch | RequestTrace
"""A record, which is written once; its first field is its key."""

RECORD_KINDS: dict[type[Record], str] = {
    ForecastRecord: "forecasts",
    FinishedRequest: "requests",
    FinishedBatch: "batches",
    RequestTrace: "traces",
}
"""Names of the kinds, in the order in which a commit writes them. Forecasts come before finished requests, so that the
examples of one commit are in order of finishing."""

MAX_INT = 2**63 - 1
"""The largest integer, and row number, of a log."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How much a log keeps.

    Attributes:
        max_rows: Most records of each kind; the oldest are dropped.
        max_artefacts: Most versions of each kind of artefact; the newest versions and the current one are kept.
    """

    max_rows: int
    max_artefacts: int


class LogBackend(Protocol):
    """One log. Every operation takes effect as a whole or not at all, and is durable when it returns.

    Attributes:
        errors: Exceptions that every operation may raise when the storage fails.
        kept: Objects of clients in the same storage.
    """

    errors: tuple[type[Exception], ...]

    @property
    def kept(self) -> KeptBackend: ...

    async def open(self) -> None:
        """Opens the log; creates a missing log and migrates a log of an earlier version.

        Raises:
            ConfigError: The place holds something else, or the storage must not be trusted with a log.
        """

    async def close(self) -> None:
        """Closes the log; allowed if it was never opened."""

    async def write(self, records: Sequence[Record]) -> dict[str, int]:
        """Appends new records and drops the oldest beyond the limit; returns the number of new records by kind."""

    async def read_requests(self, query: LogQuery) -> LogPage:
        """Returns the finished requests after a row. O(records read)."""

    async def read_examples(self, query: LogQuery) -> ExamplePage:
        """Returns the examples after a row. O(records read)."""

    async def read_batches(self, query: LogQuery) -> BatchPage:
        """Returns the finished batches after a row. O(records read)."""

    async def read_traces(self, response_id: str) -> tuple[RequestTrace, ...]:
        """Returns the traces of the requests behind a response, by ``trace_id``. O(log records + found)."""

    async def put_artefact(self, artefact: Artefact) -> bool:
        """Stores a new version and drops the oldest beyond the limit; returns False if the version is stored already.

        Raises:
            MessageError: A later version has been stored, or this version with another content.
        """

    async def set_current(self, kind: str, version: int) -> None:
        """Makes this version the current one of its kind.

        Raises:
            MessageError: The version is not stored.
        """

    async def artefact(self, kind: str, version: int | None) -> Artefact | None:
        """Returns one version, or the current version for None; None if it is not stored."""

    async def artefacts(self) -> tuple[ArtefactInfo, ...]:
        """Returns all stored versions, ordered by kind and version."""

    async def num_bytes(self) -> int | None:
        """Returns the stored size in bytes; None if the size is expensive to determine."""


def values(record: Record | Artefact) -> tuple[Any, ...]:
    """Returns the fields of a record, its key first."""
    found: tuple[Any, ...] = _GETTERS[type(record)](record)
    return found


def trace_range(response_id: str) -> tuple[str, str]:
    """Returns the bounds of the trace ids of a response: from the first, inclusive, to the second, exclusive."""
    return f"{response_id}/", f"{response_id}0"


def check_integers(record: Record | Artefact, field: str) -> None:
    """Raises MessageError, with ``field`` before the name, if a number is too large for a log."""
    for name, value in zip(_FIELDS[type(record)], values(record), strict=True):
        if type(value) is int and abs(value) > MAX_INT:
            raise MessageError(f"{field}.{name}", value, "an integer of 64 bits")


def version_refused(version: int, last_version: int) -> MessageError:
    """Makes the error for an artefact that would change or precede a stored version."""
    return MessageError("Artefact.version", version, f"a version above {last_version}, the last of its kind")


def version_unknown(kind: str, version: int) -> MessageError:
    """Makes the error for a version that is not stored and so cannot become the current version."""
    return MessageError("ArtefactName.version", version, f"a version of {kind} that is kept")


_FIELDS = {kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in (*RECORD_KINDS, Artefact)}
_GETTERS: dict[type, Callable[[Any], Any]] = {kind: operator.attrgetter(*names) for kind, names in _FIELDS.items()}
