"""Measured times and the models learned from them, to and from the ServingTimeEstimator: of steps, from and to the
Schedulers, and of whole batches, from and to the Batcher (Magnus III-D)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step and its duration; the step-time profile is fitted to samples.

    Attributes:
        prefill_tokens: Tokens computed by sequences that had more than one to compute.
        decode_seqs: Sequences that computed exactly one token.
        context_tokens: Tokens that the decoding sequences attended to, all together.
        prefill_pairs: Pairs of (prompt token, token it attended to) of the prefill (``core.costs.attention_pairs``).
    """

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    duration_s: float
    prefill_pairs: int = 0


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Scheduler -> ServingTimeEstimator: measured steps of one replica."""

    replica: str
    samples: tuple[StepSample, ...]


@dataclass(frozen=True, slots=True)
class ReplicaStepProfile:
    """How long a step of one replica takes: the sum of its terms, each in seconds a unit.

    Attributes:
        num_samples: Measured steps that it is fitted to.
        base_s: Seconds of a step without work; the other terms as in ``core.costs.StepCost``.
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
    """From the ServingTimeEstimator: the profile of every replica that has sent steps."""

    profiles: tuple[ReplicaStepProfile, ...]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The sizes of a batch from which its time is estimated.

    Attributes:
        num_requests: Number of requests.
        batch_len: L(B): tokens of its longest prompt.
        generation_len: G(B): tokens of its longest output, predicted or true.
    """

    num_requests: int
    batch_len: int
    generation_len: int


@dataclass(frozen=True, slots=True)
class BatchShapes:
    """To the ServingTimeEstimator: which batches to estimate."""

    shapes: tuple[BatchShape, ...]


@dataclass(frozen=True, slots=True)
class BatchEstimates:
    """From the ServingTimeEstimator: seconds of each batch, in the order of the question."""

    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ServedBatchTime:
    """A batch that has run to its end.

    Attributes:
        shape: With the true lengths.
        estimated_s: Seconds that it was estimated to take when it began.
        duration_s: Seconds that it took.
    """

    shape: BatchShape
    estimated_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class ServedBatchTimes:
    """To the ServingTimeEstimator: batches that have ended, in the order of their ends."""

    batches: tuple[ServedBatchTime, ...]
