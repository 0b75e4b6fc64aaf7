"""What is said to the log store and what it answers, and the records that it keeps (see ``core.messages``)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from core.errors import InvalidValueError
from core.forecast import QUANTILES

MAX_FEATURE_BYTES = 64 * 1024
"""Of one forecast in the log."""

MAX_TRACE_BYTES = 64 * 1024
"""Of the decisions of one trace."""

MAX_ARTEFACT_BYTES = 256 * 1024 * 1024
"""Of one artefact in the log."""


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Ingress -> LogStore: one request and how it went; one record a request.

    Attributes:
        attempts: Resumptions included; 1 if nothing went wrong.
        finish_reason: stop, length, abort (the client left) or error.
        received_at: Unix seconds.
        ttft_s: From receipt to the first token; None if there was none.
        jct_s: From receipt to the end.
    """

    request_id: str
    replica: str
    attempts: int
    prompt_len: int
    output_len: int
    max_new_tokens: int
    finish_reason: str
    received_at: float
    ttft_s: float | None
    jct_s: float


@dataclass(frozen=True, slots=True)
class FinishedRequests:
    """-> LogStore."""

    records: tuple[FinishedRequest, ...]


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Scheduler, Router or ingress ->: what one of them knows of the decisions about one request.

    Attributes:
        trace_id: ``RESPONSE/REQUEST/PART``; the part is an attempt at a Scheduler, or ``ingress``.
        choice, owner: As in ``core.request.Origin``.
        source: Who tells, such as ``scheduler-0``.
        ended: Whether nothing more will come of it.
        num_left_out: Decisions that are missing here because there were too many.
        decisions: ``core.decisions``, packed, on clocks that are named; at most ``MAX_TRACE_BYTES``.
    """

    trace_id: str
    request_id: str
    choice: int
    owner: bytes
    source: str
    attempt: int
    ended: bool
    num_left_out: int
    decisions: bytes

    def __post_init__(self) -> None:
        _require_bytes("decisions", len(self.decisions), MAX_TRACE_BYTES)


@dataclass(frozen=True, slots=True)
class RequestTraces:
    """-> LogStore, and the answer to ``TraceQuery``."""

    records: tuple[RequestTrace, ...]


@dataclass(frozen=True, slots=True)
class TraceQuery:
    """-> LogStore, Router -> Scheduler: what do you know of the requests behind this answer?"""

    response_id: str


@dataclass(frozen=True, slots=True)
class ForecastRecord:
    """A forecast that was made of a request, and the numbers it was made from: no text, and nothing to encode again.

    Attributes:
        request_id: One forecast of a request is kept: the first that is written.
        made_at: When, in seconds since the epoch.
        source: As in ``Forecast``; so are ``version``, ``mean``, ``quantiles`` and ``rank``.
        feature_set: What the numbers are and how they are packed; whoever learns uses those it knows.
        features: The numbers, packed; at most ``MAX_FEATURE_BYTES``.
    """

    request_id: str
    made_at: float
    source: str
    version: int
    mean: float
    quantiles: tuple[float, ...]
    rank: float | None
    feature_set: str
    features: bytes

    def __post_init__(self) -> None:
        ascends = all(a <= b for a, b in itertools.pairwise(self.quantiles))
        expected = f"{len(QUANTILES)} numbers that do not fall"
        _require(len(self.quantiles) == len(QUANTILES) and ascends, "quantiles", self.quantiles, expected)
        _require_bytes("features", len(self.features), MAX_FEATURE_BYTES)


@dataclass(frozen=True, slots=True)
class ForecastRecords:
    """-> LogStore."""

    records: tuple[ForecastRecord, ...]


@dataclass(frozen=True, slots=True)
class FinishedBatch:
    """A batch that has run to its end, and what had been expected of it.

    Attributes:
        worker: The replica that ran it.
        batch_len: Longest prompt in it, in tokens.
        generation_len: Longest output in it, in tokens; ``predicted_len`` is the forecast of that.
        estimated_time_s: How long it was expected to take; ``serving_time_s`` is how long it took.
        finished_at: In seconds since the epoch.
    """

    batch_id: str
    worker: str
    num_requests: int
    batch_len: int
    generation_len: int
    predicted_len: int
    estimated_time_s: float
    serving_time_s: float
    finished_at: float

    def __post_init__(self) -> None:
        _require(self.num_requests >= 1, "num_requests", self.num_requests, "an integer >= 1")
        for name in ("batch_len", "generation_len", "predicted_len"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "an integer >= 0")
        for name in ("estimated_time_s", "serving_time_s"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "a number >= 0")


@dataclass(frozen=True, slots=True)
class FinishedBatches:
    """-> LogStore."""

    records: tuple[FinishedBatch, ...]


@dataclass(frozen=True, slots=True)
class LogQuery:
    """-> LogStore: records after this row, at most so many."""

    after_row: int
    limit: int


@dataclass(frozen=True, slots=True)
class LogPage:
    """LogStore ->: records in order of writing, and the row of the last.

    Attributes:
        last_row: Without records the query's own row, or that of the last record ever written if that is smaller.
    """

    last_row: int
    records: tuple[FinishedRequest, ...]


@dataclass(frozen=True, slots=True)
class LoggedExample:
    """A finished request and what had been forecast of it."""

    finished: FinishedRequest
    forecast: ForecastRecord


@dataclass(frozen=True, slots=True)
class ExamplePage:
    """LogStore ->: requests of which both are known, in the order in which that came about; ``last_row`` as before.

    That is the order of finishing, but for a forecast that was written after its request had finished: its example
    stands where the forecast came, so that whoever reads on from its last row misses none.
    """

    last_row: int
    examples: tuple[LoggedExample, ...]


@dataclass(frozen=True, slots=True)
class BatchPage:
    """LogStore ->: batches in order of writing; ``last_row`` as in ``LogPage``."""

    last_row: int
    records: tuple[FinishedBatch, ...]


@dataclass(frozen=True, slots=True)
class Artefact:
    """-> LogStore and back: what was learned, such as the trees of a forest.

    Attributes:
        kind: What it is for; versions count within a kind.
        version: From 1 to 2**53, above every earlier one of its kind.
        created_at: In seconds since the epoch.
        score: How well it did on examples it had not learned from; its maker knows the measure.
        num_examples: It was learned from.
        data: At most ``MAX_ARTEFACT_BYTES``; what is in it is between its maker and its readers.
    """

    kind: str
    version: int
    created_at: float
    score: float | None
    num_examples: int
    note: str
    data: bytes

    def __post_init__(self) -> None:
        _require(self.kind != "", "kind", self.kind, "a name")
        _require_version(self.version)
        _require(self.num_examples >= 0, "num_examples", self.num_examples, "an integer >= 0")
        _require_bytes("data", len(self.data), MAX_ARTEFACT_BYTES)


@dataclass(frozen=True, slots=True)
class ArtefactName:
    """-> LogStore: one version of a kind; None is the current one."""

    kind: str
    version: int | None = None

    def __post_init__(self) -> None:
        if self.version is not None:
            _require_version(self.version)


@dataclass(frozen=True, slots=True)
class ArtefactReply:
    """LogStore ->: None if there is no such version, or none is current."""

    artefact: Artefact | None


@dataclass(frozen=True, slots=True)
class ArtefactInfo:
    """An ``Artefact`` without its data.

    Attributes:
        current: Whether it is the one to be used.
    """

    kind: str
    version: int
    created_at: float
    score: float | None
    num_examples: int
    note: str
    num_bytes: int
    current: bool


@dataclass(frozen=True, slots=True)
class ArtefactList:
    """LogStore ->: everything that is kept, by kind and version."""

    artefacts: tuple[ArtefactInfo, ...]


def _require(ok: bool, field: str, value: object, expected: str) -> None:
    if not ok:
        raise InvalidValueError(field, value, expected)


def _require_bytes(field: str, num_bytes: int, limit: int) -> None:
    _require(num_bytes <= limit, field, f"{num_bytes} bytes", f"at most {limit}")


def _require_version(version: int) -> None:
    _require(1 <= version <= 2**53, "version", version, "an integer from 1 to 2**53")
