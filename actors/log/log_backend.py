"""What a log can be kept in: the operations that every storage backend of the log store has."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from core.errors import MessageError
from core.messages.log import (
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

Record = FinishedRequest | ForecastRecord | FinishedBatch | RequestTrace
"""What is written once and known by its first field."""

RECORD_KINDS: dict[type[Record], str] = {
    ForecastRecord: "forecasts",
    FinishedRequest: "requests",
    FinishedBatch: "batches",
    RequestTrace: "traces",
}
"""Names of the kinds, in the order in which a commit writes them: forecasts before the requests they were made of, so
that the examples of one commit come in order of finishing."""

MAX_INT = 2**63 - 1
"""The largest integer, and row, of a log."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How much is kept.

    Attributes:
        max_rows: Records of each kind; the oldest go.
        max_artefacts: Versions of each kind of artefact; the newest stay, and the current one.
    """

    max_rows: int
    max_artefacts: int


class LogBackend(Protocol):
    """One log. Every operation takes effect as a whole or not at all, and lasts when it returns.

    Attributes:
        errors: What the operations raise when the log cannot be had, beside what they name.
    """

    errors: tuple[type[Exception], ...]

    async def open(self) -> None:
        """Makes the log ready, and new if it is not there; one of an earlier version is brought to this one.

        Raises:
            ConfigError: there is something else, or nothing that may be trusted with a log.
        """

    async def close(self) -> None:
        """Lets go of it; also of one that was never opened."""

    async def write(self, records: Sequence[Record]) -> dict[str, int]:
        """Appends what is not there yet and drops what is too old; says how many of each kind were new."""

    async def read_requests(self, query: LogQuery) -> LogPage:
        """O(records read)."""

    async def read_examples(self, query: LogQuery) -> ExamplePage:
        """O(records read)."""

    async def read_batches(self, query: LogQuery) -> BatchPage:
        """O(records read)."""

    async def read_traces(self, response_id: str) -> tuple[RequestTrace, ...]:
        """What is known of the requests behind an answer, in order of ``trace_id``. O(log records + found)."""

    async def put_artefact(self, artefact: Artefact) -> bool:
        """Keeps a new version and drops what is too old; False if this very version is there already.

        Raises:
            MessageError: a later version has been there, or this one with another content.
        """

    async def set_current(self, kind: str, version: int) -> None:
        """Marks the version that is to be used, and no other of its kind.

        Raises:
            MessageError: it is not kept.
        """

    async def artefact(self, kind: str, version: int | None) -> Artefact | None:
        """A version, or the current one; None if there is none."""

    async def artefacts(self) -> tuple[ArtefactInfo, ...]:
        """All that are kept, by kind and version."""

    async def num_bytes(self) -> int | None:
        """Stored size, if it can be told cheaply."""


def values(record: Record | Artefact) -> tuple[Any, ...]:
    """The fields of a record, its key first."""
    found: tuple[Any, ...] = _GETTERS[type(record)](record)
    return found


def trace_range(response_id: str) -> tuple[str, str]:
    """The traces of an answer have ids from the first of these on and before the second."""
    return f"{response_id}/", f"{response_id}0"


def check_integers(record: Record | Artefact, field: str) -> None:
    """Raises MessageError, with ``field`` before the name, if a number is too large for a log."""
    for name, value in zip(_FIELDS[type(record)], values(record), strict=True):
        if type(value) is int and abs(value) > MAX_INT:
            raise MessageError(f"{field}.{name}", value, "an integer of 64 bits")


def version_refused(version: int, last_version: int) -> MessageError:
    """An artefact that would change or precede what has been there."""
    return MessageError("Artefact.version", version, f"a version above {last_version}, the last of its kind")


def version_unknown(kind: str, version: int) -> MessageError:
    """What is not kept cannot be made current."""
    return MessageError("ArtefactName.version", version, f"a version of {kind} that is kept")


_FIELDS = {kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in (*RECORD_KINDS, Artefact)}
_GETTERS: dict[type, Callable[[Any], Any]] = {kind: operator.attrgetter(*names) for kind, names in _FIELDS.items()}
