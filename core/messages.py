"""What the actors say to each other. Every type here crosses a process boundary (see ``core.codec``).

Two rules make duplicates and late arrivals harmless (design section 3): a plan is a full snapshot, and every
grant in it is absolute ("may reach length N", never "N more").
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from core.errors import InvalidValueError
from core.forecast import QUANTILES, Forecast, ForecastQuestion
from core.request import Request, Residency, SequenceStatus

SCHEMA_VERSION = 5
"""Raised when any message changes shape; a message of another version is refused."""

MAX_FEATURE_BYTES = 64 * 1024
"""Of one forecast in the log."""

MAX_TRACE_BYTES = 64 * 1024
"""Of the decisions of one trace."""

MAX_ARTEFACT_BYTES = 256 * 1024 * 1024
"""Of one artefact in the log."""


Key = tuple[str, int]
"""(request id, attempt)."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Ingress -> Router -> Scheduler: requests, new or resumed, in order of arrival.

    Attributes:
        placements: Router -> Scheduler: why each of them is there (``core.decisions``, packed, on a clock that is
            named); kept with its other decisions, and read by nobody who decides.
    """

    requests: tuple[Request, ...]
    placements: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Keys:
    """Attempts, by key: whose clients are gone (``abort``), which the Scheduler is asked about or does not know."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Scheduler -> Router -> ingress, in answer to ``Submit``: this request will never run."""

    request_id: str
    attempt: int
    field: str
    message: str


@dataclass(frozen=True, slots=True)
class Refusals:
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """Router -> ingress: an attempt and the worker life that runs it; an empty replica while it waits for one."""

    request_id: str
    attempt: int
    replica: str
    worker_incarnation: str


@dataclass(frozen=True, slots=True)
class SubmitReply:
    placed: tuple[Placed, ...]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """An open stream as its ingress replica knows it; ``work_tokens`` is prompt plus what may yet come."""

    request_id: str
    attempt: int
    replica: str
    worker_incarnation: str
    work_tokens: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Ingress -> Router, every second and after a fault: all its open streams, so that a new Router knows them."""

    ingress_id: str
    open: tuple[OpenRequest, ...]


@dataclass(frozen=True, slots=True)
class AnnounceReply:
    """Router -> ingress.

    Attributes:
        lost: Attempts that nobody runs any more; they are to be resumed.
        refusals: Those that will never run.
        replicas: Every replica whose tokens may be for this ingress.
        placed: Attempts that wait no more, as far as the ingress did not know.
    """

    lost: tuple[Key, ...]
    refusals: tuple[Refusal, ...]
    replicas: tuple[str, ...]
    placed: tuple[Placed, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """Scheduler -> Router, every second and at once when it changes.

    Attributes:
        ready: None while the worker is away.
        refusals: Requests that turned out, since they were placed, not to fit the worker.
        broken: Of a batch that ran out of memory, all that had not ended: nobody runs them any more.
        resting: All that the replica holds, if every client of it has stopped reading: else nothing.
    """

    replica: str
    ready: WorkerReady | None
    refusals: tuple[Refusal, ...]
    broken: tuple[Key, ...] = ()
    resting: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaName:
    """Supervisor -> Router: drain this replica, or forget it."""

    replica: str


@dataclass(frozen=True, slots=True)
class InFlight:
    """Router -> Supervisor: requests still on a draining replica."""

    count: int


@dataclass(frozen=True, slots=True)
class KVTraffic:
    """What one life of a worker has done with KV so far; the numbers only rise.

    Attributes:
        offloads: Copies to the host that have arrived; ``uploads`` those to the device.
        offloaded_bytes: What they held together.
        refused_offloads: Orders to the host that found no room there, or nothing to move.
        recomputed_tokens: Tokens computed again after their KV was dropped.
    """

    offloads: int = 0
    uploads: int = 0
    offloaded_bytes: int = 0
    uploaded_bytes: int = 0
    refused_offloads: int = 0
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KVUsage:
    """KVOffloadManager ->: where the KV of one replica is, as last reported, and what has moved.

    Attributes:
        num_resident: Sequences with blocks on the device.
        short_blocks: Blocks that paused sequences lack.
        num_host_blocks: Blocks of the host pool; 0 if there is none.
        flying_blocks: Blocks that copies in flight are to fill; they hold as many in either pool.
    """

    num_blocks: int = 0
    free_blocks: int = 0
    num_resident: int = 0
    short_blocks: int = 0
    num_host_blocks: int = 0
    free_host_blocks: int = 0
    flying_blocks: int = 0
    traffic: KVTraffic = KVTraffic()


@dataclass(frozen=True, slots=True)
class Ended:
    """Scheduler -> Router: sequences that reached their end."""

    finished: tuple[FinishedSequence, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """One line of a plan; its place in the plan is its rank.

    Attributes:
        prefill_to: Known tokens (prompt, then output being recomputed) may be computed up to this position.
        length_to: The sequence may reach this total length (prompt + output).
        standby: May start only in the place of a slot that ended since the plan was made.
        num_preemptions: How often the scheduler has ordered this sequence's KV dropped, ever. The worker drops
            it when the number exceeds the one it has seen, so a late or repeated plan drops nothing twice.
        request: The payload; left out once the worker is known to have it.
        residency: Where its KV is to be; on the host it does not run.
        num_moves: How often the scheduler has changed ``residency``, ever. The worker obeys when the number exceeds
            the one it has seen, so a late or repeated plan moves nothing twice.
    """

    request_id: str
    attempt: int
    prefill_to: int
    length_to: int
    standby: bool
    num_preemptions: int
    request: Request | None
    residency: Residency = Residency.DEVICE
    num_moves: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Scheduler -> worker: everything the worker may do until the next plan.

    A sequence that is not in the plan is forgotten by the worker and its KV freed.

    Attributes:
        worker_incarnation: The worker life this plan is for; others drop it.
        lease: Which Scheduler life made it (``WorkerState.lease``); a worker drops what an earlier one made.
        plan_seq: Rises by one a plan within a lease; a worker drops what is not newer.
        as_of_report_seq: The last report the scheduler had seen.
        reserve_blocks: Blocks that must stay free when a sequence starts (not when it grows).
    """

    worker_incarnation: str
    lease: int
    plan_seq: int
    as_of_report_seq: int
    reserve_blocks: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class SlotProgress:
    """A living sequence as the worker sees it; lengths in tokens.

    Attributes:
        num_blocks: In its block table; those that it shares with others are counted for each.
        stalled: Its client does not read: it rests, whatever it has been granted.
        cached_len: Prompt tokens that it found in the prefix cache when it first started.
        residency: The wish in force. DEVICE under the ``num_moves`` of an order to the host: refused, no room there.
        num_moves: Of the last order that the worker has seen.
        num_host_blocks: Blocks of the host pool that it holds.
        ran_s: Seconds of all the steps that it took part in, in this life of the worker.
    """

    request_id: str
    attempt: int
    status: SequenceStatus
    num_preemptions: int
    computed_len: int
    output_len: int
    num_blocks: int
    stalled: bool
    cached_len: int = 0
    residency: Residency = Residency.DEVICE
    num_moves: int = 0
    num_host_blocks: int = 0
    ran_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    request_id: str
    attempt: int
    status: SequenceStatus
    output_len: int


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step and how long it took; what the step-time profile is fitted to.

    Attributes:
        prefill_tokens: Tokens computed by sequences that had more than one to compute.
        decode_seqs: Sequences that computed exactly one token.
        context_tokens: Tokens that the latter attended to, all together.
        prefill_pairs: Pairs of (prompt token, token it attended to) of the former (``core.costs.attention_pairs``).
    """

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    duration_s: float
    prefill_pairs: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """Worker -> scheduler: a snapshot; ``finished`` repeats until acknowledged.

    Attributes:
        lease: The lease in force; a Scheduler ignores reports under another one's.
        plan_seq: The plan in force when the report was made.
        short_blocks: Blocks that paused sequences lack: above 0 the worker is under pressure.
        steps: Some of the steps since the last report.
        shared_blocks: By how much the block tables in ``progress`` together exceed the blocks in use.
        num_host_blocks, free_host_blocks, flying_blocks, traffic: As in ``KVUsage``.
    """

    worker_incarnation: str
    lease: int
    report_seq: int
    plan_seq: int
    free_blocks: int
    short_blocks: int
    progress: tuple[SlotProgress, ...]
    finished: tuple[FinishedSequence, ...]
    steps: tuple[StepSample, ...]
    shared_blocks: int = 0
    num_host_blocks: int = 0
    free_host_blocks: int = 0
    flying_blocks: int = 0
    traffic: KVTraffic = KVTraffic()


@dataclass(frozen=True, slots=True)
class ReportPoll:
    """Scheduler -> worker: give me the next ``StepReport``; ``ack_seq`` is the last one received."""

    ack_seq: int


TokenLogprobs = tuple[tuple[int, ...], tuple[float, ...]]
"""Ids and their log probabilities: the token itself, then the likeliest ones, best first."""


@dataclass(frozen=True, slots=True)
class DeltaLogprobs:
    """Log probabilities that a client has asked for.

    Attributes:
        output: Of each of the delta's tokens.
        prompt: Of each of the prompt's tokens but the first; with the output's first token only.
    """

    output: tuple[TokenLogprobs, ...]
    prompt: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New output of one sequence, for the client. What has its default takes no room on the wire.

    Attributes:
        start: Index of the first of ``token_ids`` in the output; lets the ingress see gaps and repeats.
        text: What may be shown; trails ``token_ids`` while a stop string may still complete.
        finish_reason: Set on the last delta of an attempt only.
        error: Why the sequence failed, when ``finish_reason`` is ``error``.
        cached_len: Tokens of the prompt that came from a cache; on an attempt's first delta only.
        logprobs: None unless the request wants them.
    """

    request_id: str
    attempt: int
    start: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    error: str | None = None
    cached_len: int = 0
    logprobs: DeltaLogprobs | None = None


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Worker -> ingress: consecutive deltas under one sequence number, repeated until acknowledged."""

    worker_incarnation: str
    seq: int
    deltas: tuple[TokenDelta, ...]


@dataclass(frozen=True, slots=True)
class TokenPoll:
    """Ingress -> worker: give me what is new after ``ack_seq``; the worker hears from it that the ingress lives.

    Attributes:
        slow: Requests whose clients do not read; they rest until they are no longer named here.
    """

    ingress_id: str
    ack_seq: int
    slow: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TokenBatches:
    worker_incarnation: str
    batches: tuple[TokenBatch, ...]


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """What this life of the worker can hold.

    Attributes:
        num_blocks: KV blocks in the pool, of ``block_size`` tokens each.
        max_model_len: Tokens a sequence may reach: the context or the pool, whichever is smaller.
        pool_limited: Whether it is the pool.
        num_host_blocks: KV blocks in the host pool; 0 if there is none.
    """

    worker_incarnation: str
    num_blocks: int
    block_size: int
    max_model_len: int
    pool_limited: bool
    vocab_size: int
    num_host_blocks: int = 0


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Worker -> Scheduler, when one takes over: everything it needs to go on where another one left.

    Attributes:
        lease: Belongs to the Scheduler that asked; plans of earlier leases are dropped from now on.
        held: The requests of the sequences in ``report.progress``, in their order.
    """

    lease: int
    ready: WorkerReady
    held: tuple[Request, ...]
    report: StepReport


@dataclass(frozen=True, slots=True)
class ForecastQuestions:
    """Ingress -> LengthPredictor: how long will these be?"""

    questions: tuple[ForecastQuestion, ...]


@dataclass(frozen=True, slots=True)
class Forecasts:
    """LengthPredictor ->: one for each question, in their order."""

    forecasts: tuple[Forecast, ...]


@dataclass(frozen=True, slots=True)
class ForecastMade:
    """Ingress -> Router -> Scheduler: what has been foreseen of an attempt that is on its way already."""

    request_id: str
    attempt: int
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class ForecastsMade:
    made: tuple[ForecastMade, ...]


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Scheduler -> ServingTimeEstimator: measured steps of one replica."""

    replica: str
    samples: tuple[StepSample, ...]


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
    """-> LogStore and back: what was learnt, such as the trees of a forest.

    Attributes:
        kind: What it is for; versions count within a kind.
        version: From 1 to 2**53, above every earlier one of its kind.
        created_at: In seconds since the epoch.
        score: How well it did on examples it had not learnt from; its maker knows the measure.
        num_examples: It was learnt from.
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


@dataclass(frozen=True, slots=True)
class PieceStatus:
    """One row of ``farsight status``: a logical piece, wherever it is hosted.

    Attributes:
        state: ready, starting, waiting (for a piece it depends on), draining, dead or lost (silent).
        restarts: How often the supervisor has started it again.
        http_port: Of the /healthz and /metrics of its process, on the loopback interface; 0 if there are none.
    """

    name: str
    kind: str
    pid: int
    node: str
    state: str
    queue: int
    last_step_age_s: float | None
    restarts: int
    http_port: int


@dataclass(frozen=True, slots=True)
class PieceRows:
    """The pieces of one process."""

    pieces: tuple[PieceStatus, ...]


@dataclass(frozen=True, slots=True)
class StatusReply:
    """Every logical piece, the KV of all replicas together as last reported, and what has been learnt while serving."""

    pieces: tuple[PieceStatus, ...]
    kv: KVUsage
    artefacts: tuple[ArtefactInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class PieceCounts:
    """Supervisor ->: how many there should be of what can be scaled."""

    replicas: int
    length_predictors: int
    serving_time_estimators: int
    ingress_replicas: int


@dataclass(frozen=True, slots=True)
class Scale:
    """-> Supervisor: there should be ``count`` of ``kind``."""

    kind: str
    count: int


@dataclass(frozen=True, slots=True)
class ReplicaStepProfile:
    """How long a step of one replica takes: the sum of its terms, each in seconds a unit.

    Attributes:
        num_samples: Measured steps it rests on.
        base_s: Of a step without work; the other terms as in ``core.costs.StepCost``.
    """

    replica: str
    num_samples: int
    base_s: float
    prefill_token_s: float
    decode_seq_s: float
    context_token_s: float
    prefill_pair_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepProfileReply:
    """ServingTimeEstimator ->: the profile of every replica it has heard of."""

    profiles: tuple[ReplicaStepProfile, ...]


def _require(ok: bool, field: str, value: object, expected: str) -> None:
    if not ok:
        raise InvalidValueError(field, value, expected)


def _require_bytes(field: str, num_bytes: int, limit: int) -> None:
    _require(num_bytes <= limit, field, f"{num_bytes} bytes", f"at most {limit}")


def _require_version(version: int) -> None:
    _require(1 <= version <= 2**53, "version", version, "an integer from 1 to 2**53")
