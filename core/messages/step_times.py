"""Measured steps and the step profiles fitted to them: Scheduler -> ServingTimeEstimator -> Scheduler."""

from __future__ import annotations

from dataclasses import dataclass


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
