"""What a prediction of the queue delay rests on. A message, like those of ``core.messages``."""

from __future__ import annotations

from dataclasses import dataclass

from core.costs import StepCost


@dataclass(frozen=True, slots=True)
class Demand:
    """Everything that waits or is on our own engine; tokens are sums over its requests, as each was placed or came.

    Attributes:
        num_waiting: Requests that no replica has.
        num_busy: Replicas that have any.
        known_tokens: Prompts, and outputs of earlier attempts.
        cached_tokens: Of these, believed to be in the prefix cache of their replica.
        output_tokens: Still foreseen.
    """

    num_requests: int
    num_waiting: int
    num_busy: int
    known_tokens: float
    cached_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Router ->: the demand, and what serves it.

    Attributes:
        num_replicas: That take requests now.
        max_num_seqs: Requests that one of them runs at once at most.
        kv_tokens: That the smallest of them holds; 0 if there is none.
        joins: Whether a request joins what runs (continuous batching), or waits for a replica that is idle.
        cost: Of a step, as measured; None before enough has been.
    """

    demand: Demand
    num_replicas: int
    max_num_seqs: int
    kv_tokens: int
    joins: bool
    cost: StepCost | None
