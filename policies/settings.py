"""Settings of the parts; each part reads the settings that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from farsight.core.config.scheduling import BatchConfig, PlacementConfig, SchedulerConfig
from farsight.core.costs import A100_7B, StepCost
from farsight.core.errors import InvalidValueError

PRIOR_COST = A100_7B
"""Assumed cost of steps until steps have been measured."""

PRIOR_CAPACITY = 100_000
"""KV capacity in tokens that is assumed of a replica until the replica has reported its own."""

ServingTime = Callable[[int, int, int], float]
"""(batch size, L(B) tokens, G(B) tokens) -> estimated seconds."""


@dataclass(frozen=True, slots=True)
class MlfqRules:
    """Rules of FastServe's queue that no server sets: its artifact and its baselines differ from the text.

    Attributes:
        follows_cost: q_1 follows the measured iteration time (``price``); ``quantum_s`` is its lower bound.
        starve_check_every: Scheduling points between two checks of the waiting times (artifact: 1000). Under lasting
            overload, rare checks keep promoted jobs from filling level 1.
        max_prompt_tokens: Prompt tokens of one iteration (artifact: 2048). A job whose missing prefill does not fit
            goes after all others of its urgency: it could not compute yet, and would only take memory from jobs that
            can.
        strict: A quantum must be larger than the iteration of a job that joins, and a job sinks only once it has
            exceeded its quantum (the letter of the text, and the artifact). By default equality is enough; only that
            gives the numbers of Fig. 6.
        demotes_to_front: A job that sinks becomes the first of its new queue (artifact) instead of the last.

    Raises:
        InvalidValueError: a value out of range.
    """

    follows_cost: bool = True
    starve_check_every: int = 1
    max_prompt_tokens: int = 2048
    strict: bool = False
    demotes_to_front: bool = False

    def __post_init__(self) -> None:
        if self.starve_check_every < 1:
            raise InvalidValueError("starve_check_every", self.starve_check_every, "at least 1")
        if self.max_prompt_tokens < 1:
            raise InvalidValueError("max_prompt_tokens", self.max_prompt_tokens, "at least 1")


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Settings that the parts of a replica read: a server's own tables, measured values, values that no server sets.

    Attributes:
        scheduler: As configured. Its names of parts are not read here: ``build_scheduler`` gets them.
        placement: As configured: parts and numbers of E2.
        cost: Cost of steps until the real cost has been measured.
        max_new_tokens: Output length that Past-Future expects before any request has finished.
        theta: Hysteresis of the Gittins order.
        mlfq: Variants of the skip-join MLFQ.
        block_size: Tokens of a block, as placement by prefixes counts them.
        seed: Random seed; the same seed gives the same draws.
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    cost: StepCost = PRIOR_COST
    max_new_tokens: int = 4096
    theta: float = 4.0
    mlfq: MlfqRules = field(default_factory=MlfqRules)
    block_size: int = 64
    seed: int = 0


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Settings that the parts of batch mode read.

    Attributes:
        memory_tokens: KV tokens of a worker (Theta / Delta of Magnus).
        serving_time_s: Estimates the seconds of a batch from its jobs, prompt tokens and output tokens.
        batch: As configured.
        edges: Boundaries of the bins of predicted lengths; None: as many bins as configured, with edges that are
            learned.
        max_num_seqs: Most jobs that a worker runs at once; no batch is larger.
    """

    memory_tokens: float
    serving_time_s: ServingTime
    batch: BatchConfig = field(default_factory=BatchConfig)
    edges: tuple[float, ...] | None = None
    max_num_seqs: int | None = None
