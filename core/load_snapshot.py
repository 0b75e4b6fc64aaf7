"""The load from which the queue delay is predicted. A message, like those of ``core.messages``."""

from __future__ import annotations

from dataclasses import dataclass

from core.costs import StepCost


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests that wait or are on our own engine; token counts are sums over them, as of each one's placement or
    arrival.

    Attributes:
        num_waiting: Requests that are on no replica yet.
        num_busy: Replicas that have requests.
        known_tokens: Tokens of prompts, and of outputs of earlier attempts.
        cached_tokens: Known tokens that are believed to be in the prefix cache of their replica.
        output_tokens: Predicted tokens that are still to come.
    """

    num_requests: int
    num_waiting: int
    num_busy: int
    known_tokens: float
    cached_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """From the Router: the demand, and the replicas that serve it.

    Attributes:
        num_replicas: Replicas that take requests now.
        max_num_seqs: Most requests that one of them runs at once.
        kv_tokens: KV tokens that the smallest of them holds; 0 if there is none.
        joins: Whether a request joins what runs (continuous batching), or waits for a replica that is idle.
        cost: Measured cost of a step; None before enough steps have been measured.
    """

    demand: Demand
    num_replicas: int
    max_num_seqs: int
    kv_tokens: int
    joins: bool
    cost: StepCost | None
