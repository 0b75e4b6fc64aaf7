"""What the actors say to each other. Every type here crosses a process boundary (see ``core.codec``).

Two rules make duplicates and late arrivals harmless (design section 3): a plan is a full snapshot, and every
grant in it is absolute ("may reach length N", never "N more").
"""

from __future__ import annotations

from dataclasses import dataclass

from core.forecast import Forecast, ForecastQuestion
from core.messages.cache import CacheNotice, StartedRequest
from core.messages.kv import NO_TRAFFIC, KVTraffic, KVUsage
from core.messages.log import ArtefactInfo
from core.request import Request, Residency, SequenceStatus

SCHEMA_VERSION = 6
"""Raised when any message changes shape; a message of another version is refused."""

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
        cache_seq: Of the last notice of its prefix cache that the Router has been sent; 0 if there was none.
    """

    replica: str
    ready: WorkerReady | None
    refusals: tuple[Refusal, ...]
    broken: tuple[Key, ...] = ()
    resting: tuple[Key, ...] = ()
    cache_seq: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaName:
    """Supervisor -> Router: drain this replica, or forget it."""

    replica: str


@dataclass(frozen=True, slots=True)
class InFlight:
    """Router -> Supervisor: requests still on a draining replica."""

    count: int


@dataclass(frozen=True, slots=True)
class ReplicaNews:
    """Scheduler -> Router, several times a second: what has become of requests there, and of the prefix cache.

    Attributes:
        finished: Sequences that reached their end; what they left in the cache is in this message, or was in an
            earlier one.
        cache: The worker's notices, in order; none where placement does not look at prefixes.
        profile: What steps cost there, if that has been measured anew.
    """

    replica: str
    worker_incarnation: str
    started: tuple[StartedRequest, ...] = ()
    finished: tuple[FinishedSequence, ...] = ()
    cache: tuple[CacheNotice, ...] = ()
    profile: ReplicaStepProfile | None = None


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
    """
    Attributes:
        cached_len: Prompt tokens that it found in the prefix cache when it first started.
        ran_s: Seconds of all the steps that it took part in.
    """

    request_id: str
    attempt: int
    status: SequenceStatus
    output_len: int
    cached_len: int = 0
    ran_s: float = 0.0


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
        cache: Notices of the prefix cache; each repeats until acknowledged.
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
    traffic: KVTraffic = NO_TRAFFIC
    cache: tuple[CacheNotice, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportPoll:
    """Scheduler -> worker: give me the next ``StepReport``; ``ack_seq`` is the last one received.

    Attributes:
        wants_cache: Notices were lost: it is to tell all that is cached.
    """

    ack_seq: int
    wants_cache: bool = False


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
        cached_len: Tokens of the prompt that came from a cache; on an attempt's first delta, or its last (a server).
        logprobs: None unless the request wants them.
        num_unnamed: Tokens after ``token_ids`` of which only the text is known: another server's.
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
    num_unnamed: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_unnamed


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
        external: It is another server, which takes no requests that only our own engine can answer.
    """

    worker_incarnation: str
    num_blocks: int
    block_size: int
    max_model_len: int
    pool_limited: bool
    vocab_size: int
    num_host_blocks: int = 0
    external: bool = False


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Router -> ingress: what a request may be.

    Attributes:
        ready: Of the replica that holds the shortest sequences.
        prefix_block_size: Tokens of a block of ``Request.prefix_hashes``; 0 where nobody looks at prefixes.
    """

    ready: WorkerReady
    prefix_block_size: int = 0


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
class PieceStatus:
    """One row of ``farsight status``: a logical piece, wherever it is hosted.

    Attributes:
        state: ready, starting, waiting (for a piece it depends on), draining, dead or lost (silent).
        restarts: How often the supervisor has started it again.
        http_port: Of the /healthz and /metrics of its process, on the loopback interface; 0 if there are none.
        url, breaker: Of a replica that is another server: where it is; ``closed``, or why requests do not go there.
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
    url: str = ""
    breaker: str = ""


@dataclass(frozen=True, slots=True)
class PieceRows:
    """The pieces of one process."""

    pieces: tuple[PieceStatus, ...]


@dataclass(frozen=True, slots=True)
class StatusReply:
    """Every logical piece, the KV of all replicas together as last reported, and what has been learnt while serving.

    Attributes:
        queue_delay_s: That a request which came now is predicted to wait; None if that cannot be said.
    """

    pieces: tuple[PieceStatus, ...]
    kv: KVUsage
    artefacts: tuple[ArtefactInfo, ...] = ()
    queue_delay_s: float | None = None


@dataclass(frozen=True, slots=True)
class PieceCounts:
    """Supervisor ->: how many there should be of what can be scaled; ``backends`` are other servers."""

    replicas: int
    length_predictors: int
    serving_time_estimators: int
    ingress_replicas: int
    backends: int = 0


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
