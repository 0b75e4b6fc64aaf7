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
        output_variance: Variance of that sum by the laws of the lengths, in tokens squared.
        num_with_targets: Requests that have a deadline or an SLO, and so go before the others once they can wait no
            longer.
    """

    num_requests: int
    num_waiting: int
    num_busy: int
    known_tokens: float
    cached_tokens: float
    output_tokens: float
    output_variance: float = 0.0
    num_with_targets: int = 0

    def scaled(self, share: float) -> Demand:
        """Returns this share of the demand, 0 to 1: the same mixture on as many busy replicas."""
        return Demand(
            round(self.num_requests * share),
            round(self.num_waiting * share),
            self.num_busy,
            self.known_tokens * share,
            self.cached_tokens * share,
            self.output_tokens * share,
            self.output_variance * share,
            round(self.num_with_targets * share),
        )


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """From the Router: the demand, and the replicas that serve it.

    Attributes:
        num_replicas: Replicas that take requests now.
        max_num_seqs: Most requests that one of them runs at once.
        kv_tokens: KV tokens that the smallest of them holds; 0 if there is none.
        joins: Whether a request joins what runs (continuous batching), or waits for a replica that is idle.
        cost: Measured cost of a step; None before enough steps have been measured.
        lengths: Recent output lengths, at the levels of ``core.forecast.QUANTILES``; none before any has ended.
    """

    demand: Demand
    num_replicas: int
    max_num_seqs: int
    kv_tokens: int
    joins: bool
    cost: StepCost | None
    lengths: tuple[float, ...] = ()
