"""What the actors say to each other. Every type here crosses a process boundary (see ``core.codec``).

Two rules make duplicates and late arrivals harmless (design section 3): a plan is a full snapshot, and every
grant in it is absolute ("may reach length N", never "N more").
"""

from __future__ import annotations

from dataclasses import dataclass

from core.request import Request, SequenceStatus

SCHEMA_VERSION = 1
"""Raised when any message changes shape; a message of another version is refused."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Ingress -> scheduler: new requests, in order of arrival."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Ingress -> scheduler: the clients of these (request_id, attempt) pairs are gone."""

    keys: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Scheduler -> ingress, in answer to ``Submit``: this request will never run."""

    request_id: str
    attempt: int
    field: str
    message: str


@dataclass(frozen=True, slots=True)
class Refusals:
    refusals: tuple[Refusal, ...]


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
    """

    request_id: str
    attempt: int
    prefill_to: int
    length_to: int
    standby: bool
    num_preemptions: int
    request: Request | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Scheduler -> worker: everything the worker may do until the next plan.

    A sequence that is not in the plan is forgotten by the worker and its KV freed.

    Attributes:
        worker_incarnation: The worker life this plan is for; others drop it.
        plan_seq: Rises by one a plan; a worker drops what is not newer.
        as_of_report_seq: The last report the scheduler had seen.
        reserve_blocks: Blocks that must stay free when a sequence starts (not when it grows).
    """

    worker_incarnation: str
    plan_seq: int
    as_of_report_seq: int
    reserve_blocks: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class SlotProgress:
    """A living sequence as the worker sees it; lengths in tokens."""

    request_id: str
    attempt: int
    status: SequenceStatus
    num_preemptions: int
    computed_len: int
    output_len: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    request_id: str
    attempt: int
    status: SequenceStatus
    output_len: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """Worker -> scheduler: a snapshot; ``finished`` repeats until acknowledged.

    Attributes:
        plan_seq: The plan in force when the report was made.
        short_blocks: Blocks that paused sequences lack: above 0 the worker is under pressure.
    """

    worker_incarnation: str
    report_seq: int
    plan_seq: int
    free_blocks: int
    short_blocks: int
    progress: tuple[SlotProgress, ...]
    finished: tuple[FinishedSequence, ...]


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New output of one sequence, for the client.

    Attributes:
        start: Index of the first of ``token_ids`` in the output; lets the ingress see gaps and repeats.
        text: What may be shown; trails ``token_ids`` while a stop string may still complete.
        finish_reason: Set on the last delta of an attempt only.
        error: Why the sequence failed, when ``finish_reason`` is ``error``.
    """

    request_id: str
    attempt: int
    start: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Worker -> ingress: consecutive deltas under one sequence number, repeated until acknowledged."""

    worker_incarnation: str
    seq: int
    deltas: tuple[TokenDelta, ...]


@dataclass(frozen=True, slots=True)
class TokenBatches:
    batches: tuple[TokenBatch, ...]


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """Worker -> everyone, once: what this life of the worker can hold.

    Attributes:
        num_blocks: KV blocks in the pool, of ``block_size`` tokens each.
        max_model_len: Tokens a sequence may reach: the model's context or the pool, whichever is smaller.
        pool_limited: Whether it is the pool.
    """

    worker_incarnation: str
    num_blocks: int
    block_size: int
    max_model_len: int
    pool_limited: bool
    vocab_size: int


@dataclass(frozen=True, slots=True)
class PieceStatus:
    """One row of ``farsight status``: a logical piece, wherever it is hosted."""

    name: str
    kind: str
    pid: int
    node: str
    state: str
    queue: int
    last_step_age_s: float | None


@dataclass(frozen=True, slots=True)
class StatusReply:
    """Every logical piece, and the KV pool as last reported."""

    pieces: tuple[PieceStatus, ...]
    num_blocks: int
    free_blocks: int
