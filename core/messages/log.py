"""Messages to and from the log store, and the records that it keeps (see ``core.messages``)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from farsight.core.costs import StepCost
from farsight.core.errors import InvalidValueError
from farsight.core.forecast import QUANTILES

MAX_FEATURE_BYTES = 64 * 1024
"""Most bytes of one forecast's features in the log."""

MAX_TRACE_BYTES = 64 * 1024
"""Most bytes of the decisions of one trace."""

MAX_ARTEFACT_BYTES = 256 * 1024 * 1024
"""Most bytes of one artefact in the log."""


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Ingress -> LogStore: the record of one request that ended; one for each request.

    Attributes:
        attempts: Number of attempts, resumptions included; 1 if no attempt was lost.
        finish_reason: stop, length, abort (the client left) or error.
        received_at: When the request came, in seconds since the epoch.
        ttft_s: Seconds from receipt to the first token; None if there was none.
        jct_s: Seconds from receipt to the end.
        priority, tenant: As in ``core.request.Request``.
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
    priority: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """From a Scheduler, the Router or an ingress: the decisions about one request that the sender knows.

    Attributes:
        trace_id: ``RESPONSE/REQUEST/PART``; the part is an attempt at a Scheduler, or ``ingress``.
        choice, owner: As in ``core.request.Origin``.
        source: The sender, such as ``scheduler-0``.
        ended: Whether the trace is complete.
        num_left_out: Decisions that are missing here because the trace was full.
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
    """To the LogStore: traces. Also the answer to ``TraceQuery``."""

    records: tuple[RequestTrace, ...]


@dataclass(frozen=True, slots=True)
class TraceQuery:
    """To the LogStore, and Router -> Scheduler: asks for the traces of the requests behind this answer."""

    response_id: str


@dataclass(frozen=True, slots=True)
class ForecastRecord:
    """A forecast that was made of a request, and the numbers it was made from: no text, and nothing to encode again.

    Attributes:
        request_id: The log keeps one forecast of a request: the first that is written.
        made_at: When, in seconds since the epoch.
        source: As in ``Forecast``; so are ``version``, ``mean``, ``quantiles`` and ``rank``.
        feature_set: Names the features and their packing; a trainer uses the sets that it knows.
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
class FinishedBatch:
    """A batch that has run to its end, and its estimated time.

    Attributes:
        worker: The replica that ran it.
        batch_len: Longest prompt in it, in tokens.
        generation_len: Longest output in it, in tokens; ``predicted_len`` is the forecast of that length.
        estimated_time_s: Estimated seconds of the batch; ``serving_time_s`` is the measured time.
        finished_at: Time of the end, in seconds since the epoch.
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
class LogRecords:
    """-> LogStore: new records, of any kinds."""

    requests: tuple[FinishedRequest, ...] = ()
    forecasts: tuple[ForecastRecord, ...] = ()
    batches: tuple[FinishedBatch, ...] = ()
    traces: tuple[RequestTrace, ...] = ()


@dataclass(frozen=True, slots=True)
class LogQuery:
    """To the LogStore: asks for at most ``limit`` records after this row."""

    after_row: int
    limit: int


@dataclass(frozen=True, slots=True)
class LogPage:
    """From the LogStore: records in order of writing, and the row of the last.

    Attributes:
        last_row: Without records, the query's own row, or the row of the last record ever written if that is smaller.
    """

    last_row: int
    records: tuple[FinishedRequest, ...]


@dataclass(frozen=True, slots=True)
class LoggedExample:
    """A finished request and its forecast."""

    finished: FinishedRequest
    forecast: ForecastRecord


@dataclass(frozen=True, slots=True)
class ExamplePage:
    """From the LogStore: requests whose record and forecast are both known; ``last_row`` as in ``LogPage``.

    Examples are in the order in which the second of the two was written. That is the order of finishing, except where
    the forecast came after its request had finished. So a reader that goes on from its last row misses no example.
    """

    last_row: int
    examples: tuple[LoggedExample, ...]


@dataclass(frozen=True, slots=True)
class BatchPage:
    """From the LogStore: batches in order of writing; ``last_row`` as in ``LogPage``."""

    last_row: int
    records: tuple[FinishedBatch, ...]


@dataclass(frozen=True, slots=True)
class Artefact:
    """To the LogStore and back: a learned model, such as the trees of a forest.

    Attributes:
        kind: Purpose of the artefact; versions count within a kind.
        version: From 1 to 2**53, above every earlier one of its kind.
        created_at: Time of creation, in seconds since the epoch.
        score: Its score on examples that it was not trained on; the maker defines the measure.
        num_examples: Number of examples that it was trained on.
        data: At most ``MAX_ARTEFACT_BYTES``; its maker and its readers agree on the format.
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
    """To the LogStore: asks for one version of a kind; None is the current one."""

    kind: str
    version: int | None = None

    def __post_init__(self) -> None:
        if self.version is not None:
            _require_version(self.version)


@dataclass(frozen=True, slots=True)
class ArtefactInfo:
    """An ``Artefact`` without its data.

    Attributes:
        current: Whether readers are to use this version.
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
    """From the LogStore: all kept artefacts, by kind and version."""

    artefacts: tuple[ArtefactInfo, ...]


@dataclass(frozen=True, slots=True)
class ServedAs:
    """How the service runs requests, for the process that simulates.

    Attributes:
        settings: The server's tables ``scheduler``, ``placement`` and ``batch``, as JSON.
        kv_tokens, max_num_seqs, cost: As in ``LoadSnapshot``.
    """

    settings: str
    num_replicas: int
    kv_tokens: int
    max_num_seqs: int
    cost: StepCost


@dataclass(frozen=True, slots=True)
class LoggedWindow:
    """One request, the requests that ended around it, and how all of them were served; ``request_id`` is empty where
    the latest requests are meant, all alike."""

    request_id: str
    served: ServedAs
    records: tuple[FinishedRequest, ...]


@dataclass(frozen=True, slots=True)
class WhatIfQuestion:
    """``preset``, ``replicas`` and ``priority`` are the change; empty or None is as it was."""

    window: LoggedWindow
    preset: str = ""
    replicas: int | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class RecentTimes:
    """Times of several requests in seconds: means, and the 99th percentile of those to the end."""

    ttft_s: float
    jct_s: float
    jct_p99_s: float


@dataclass(frozen=True, slots=True)
class RecentAnswer:
    """How the latest requests were served, and how they would have been."""

    num_requests: int
    logged: RecentTimes
    changed: RecentTimes


@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    """How the request would have ended under the change; times in seconds.

    Attributes:
        problem: Why there is no answer; else empty.
        is_whole: Whether no other request can have had an effect, as far as the log tells.
        recent: The answer where the question names no request; then the figures above are 0.
    """

    logged_jct_s: float = 0.0
    jct_s: float = 0.0
    before_ttft_s: float = 0.0
    before_jct_s: float = 0.0
    after_ttft_s: float = 0.0
    after_jct_s: float = 0.0
    problem: str = ""
    is_whole: bool = True
    recent: RecentAnswer | None = None


def _require(ok: bool, field: str, value: object, expected: str) -> None:
    if not ok:
        raise InvalidValueError(field, value, expected)


def _require_bytes(field: str, num_bytes: int, limit: int) -> None:
    _require(num_bytes <= limit, field, f"{num_bytes} bytes", f"at most {limit}")


def _require_version(version: int) -> None:
    _require(1 <= version <= 2**53, "version", version, "an integer from 1 to 2**53")
