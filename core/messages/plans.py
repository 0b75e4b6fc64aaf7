"""Plans and reports: Scheduler -> worker -> Scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from farsight.core.messages.kv import NO_TRAFFIC, Brought, KVTraffic
from farsight.core.messages.step_times import StepSample
from farsight.core.request import Request, Residency, SequenceStatus


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
        residency: Where the Scheduler wants its KV; with KV on the host it does not run.
        num_moves: How often the scheduler has changed ``residency``, ever. The worker obeys when the number exceeds
            the one it has seen, so a late or repeated plan moves nothing twice.
        rests: The sequence keeps its KV and computes nothing, unless there is nothing else to compute.
        cut_off_at_s: A step is cut off when this sequence has taken part in steps of so many seconds
            (``SlotProgress.ran_s``); it then waits for a plan that gives it more. 0: steps run to their ends.
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
    rests: bool = False
    cut_off_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Scheduler -> worker: everything the worker may do until the next plan.

    A sequence that is not in the plan is forgotten by the worker and its KV freed.

    Attributes:
        worker_incarnation: The worker life this plan is for; others drop it.
        lease: The Scheduler life that made it (``WorkerState.lease``); a worker drops plans of an earlier life.
        plan_seq: Rises by one a plan within a lease; a worker drops plans that are not newer than its own.
        as_of_report_seq: The last report the scheduler had seen.
        reserve_blocks: Blocks that must stay free when a sequence starts (not when it grows).
        prompt_tokens: Prompt tokens of a step in which a sequence decodes, at most; 0 for no bound but the step's own.
        places: Sequences of a step, at most; 0 for no bound but the worker's own.
    """

    worker_incarnation: str
    lease: int
    plan_seq: int
    as_of_report_seq: int
    reserve_blocks: int
    slots: tuple[Slot, ...]
    prompt_tokens: int = 0
    places: int = 0


@dataclass(frozen=True, slots=True)
class SlotProgress:
    """A living sequence as the worker sees it; lengths in tokens.

    Attributes:
        num_blocks: Blocks in its table; a shared block counts for each sequence that shares it.
        stalled: Whether the sequence is paused, whatever its grants say, because its client does not read.
        cached_len: Prompt tokens that it found in the prefix cache when it first started.
        residency: The order in force. DEVICE with the ``num_moves`` of an order to the host means that the order was
            refused for want of room there.
        num_moves: ``num_moves`` of the last order that the worker has seen.
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
        gpu_s: Its share of them (``core.costs.row_shares``); 0 from another server.
        brought: What came back from tiers below the device when it first started; None if nothing did.
    """

    request_id: str
    attempt: int
    status: SequenceStatus
    output_len: int
    cached_len: int = 0
    ran_s: float = 0.0
    gpu_s: float = 0.0
    brought: Brought | None = None


@dataclass(frozen=True, slots=True)
class TenantService:
    """The work of a worker for a tenant since the worker started.

    Attributes:
        gpu_s: GPU-seconds (``core.costs.row_shares``), aborted and recomputed sequences included.
    """

    tenant: str
    gpu_s: float


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
        cache: KV cache events; each repeats until acknowledged.
        services: Tenants whose sums have grown since the last acknowledged report; all of them in the first report of
            a lease.
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
    cache: tuple[KVCacheEvent, ...] = ()
    services: tuple[TenantService, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportPoll:
    """Scheduler -> worker: asks for the next ``StepReport``; ``ack_seq`` is the last one received.

    Attributes:
        wants_cache: KV cache events were lost: the worker sends the complete set.
    """

    ack_seq: int
    wants_cache: bool = False


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """Capacity of this life of the worker, and what its clients may know of its model.

    Attributes:
        num_blocks: KV blocks in the pool, of ``block_size`` tokens each.
        max_model_len: Tokens a sequence may reach: the context or the pool, whichever is smaller.
        pool_limited: Whether the pool sets ``max_model_len``.
        num_host_blocks: KV blocks in the host pool; 0 if there is none.
        external: The replica is another server, which takes no requests that only our own engine can answer.
        model_version: As of ``Request``; means nothing for another server.
        end_ids: Token ids that end an output.
    """

    worker_incarnation: str
    num_blocks: int
    block_size: int
    max_model_len: int
    pool_limited: bool
    vocab_size: int
    num_host_blocks: int = 0
    external: bool = False
    model_version: int = 0
    end_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Worker -> Scheduler: everything that a Scheduler needs to continue where another one left off.

    Attributes:
        lease: Belongs to the Scheduler that asked; plans of earlier leases are dropped from now on.
        held: The requests of the sequences in ``report.progress``, in their order.
    """

    lease: int
    ready: WorkerReady
    held: tuple[Request, ...]
    report: StepReport


@dataclass(frozen=True, slots=True)
class CachedRun:
    """Cached blocks that follow each other, by their chained hashes (``kvcache.block_manager``).

    Attributes:
        parent: Hash of the block before the first of them, cached as well; 0 if the first begins a sequence.
    """

    parent: int
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVCacheEvent:
    """Worker -> Scheduler -> Router: blocks that a worker's prefix cache has stored and evicted.

    Attributes:
        seq: Rises by one with each event within a worker's life.
        whole: ``stored`` is the complete set, whatever earlier events said.
        stored: Parents before their successors. Blocks that were stored before may be named again.
        evicted: Hashes, successors before their predecessors; no successor of an evicted block stays cached.
    """

    seq: int
    whole: bool
    stored: tuple[CachedRun, ...] = ()
    evicted: tuple[int, ...] = ()

    @property
    def num_hashes(self) -> int:
        return len(self.evicted) + sum(len(run.hashes) for run in self.stored)


@dataclass(frozen=True, slots=True)
class CacheReply:
    """Scheduler -> Router: all blocks that the worker caches, as a ``whole`` event; None if that is not known."""

    worker_incarnation: str
    notice: KVCacheEvent | None


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """An attempt has run for the first time.

    Attributes:
        cached_len: Prompt tokens that the replica found cached.
        queue_s: Seconds that it waited there.
    """

    request_id: str
    attempt: int
    cached_len: int
    queue_s: float
