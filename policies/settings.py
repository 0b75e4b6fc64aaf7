"""Settings of the parts. ``core.config`` and the simulator fill them in; each part reads those that it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from core.config.placement import PlacementConfig
from core.costs import A100_7B, StepCost
from core.errors import InvalidValueError

PRIOR_COST = A100_7B
"""Assumed cost of steps until steps have been measured."""

PRIOR_CAPACITY = 100_000
"""KV capacity in tokens that is assumed of a replica until the replica has reported its own."""

ServingTime = Callable[[int, int, int], float]
"""(batch size, L(B) tokens, G(B) tokens) -> estimated seconds."""


@dataclass(frozen=True, slots=True)
class MlfqRules:
    """The parameters of the scheduler; the defaults are those of FastServe's artifact where it has one.

    Attributes:
        quantum_s: q_1, the quantum of level 1; the shortest iteration time of the model.
        follows_cost: q_1 follows the measured iteration time (``price``); ``quantum_s`` is its lower bound.
        ratio: Quantum of a level divided by the quantum of the level above it.
        num_levels: K; the last level is then unbounded. None: levels are made on demand.
        starve_limit_s: Promote a job to level 1 when it has waited for so many seconds; infinity for never.
        starve_check_every: Scheduling points between two checks of the waiting times (artifact: 1000). Under lasting
            overload, rare checks keep promoted jobs from filling level 1.
        max_prompt_tokens: Prompt tokens of one iteration (artifact: 2048). A job whose missing prefill does not fit
            goes after all others of its urgency: it could not compute yet, and would only take memory from jobs that
            can.
        skip_join: Whether a job joins at the level of its predicted prefill. Otherwise every job joins at level 1 and
            sinks level by level (the paper's MLFQ-no-preemption, and MLFQ-preemption with ``kills``).
        kills: The executor must cut an iteration off when ``slice_s`` is over: the work of that iteration is lost, and
            its time counts as attained. Otherwise iterations are never interrupted.
        strict: A quantum must be larger than the iteration of a job that joins, and a job sinks only once it has
            exceeded its quantum (the letter of the text, and the artifact). By default equality is enough; only that
            gives the numbers of Fig. 6.
        demotes_to_front: A job that sinks becomes the first of its new queue (artifact) instead of the last.

    Raises:
        InvalidValueError: a value out of range.
    """

    quantum_s: float = 0.010
    follows_cost: bool = False
    ratio: float = 2.0
    num_levels: int | None = None
    starve_limit_s: float = 3.0
    starve_check_every: int = 1
    max_prompt_tokens: int = 2048
    skip_join: bool = True
    kills: bool = False
    strict: bool = False
    demotes_to_front: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.quantum_s < math.inf:
            raise InvalidValueError("quantum_s", self.quantum_s, "a positive number of seconds")
        if not 1 < self.ratio < math.inf:
            raise InvalidValueError("ratio", self.ratio, "a number above 1")
        if self.num_levels is not None and self.num_levels < 1:
            raise InvalidValueError("num_levels", self.num_levels, "at least 1, or None")
        if not self.starve_limit_s > 0:
            raise InvalidValueError("starve_limit_s", self.starve_limit_s, "a positive number of seconds or infinity")
        if self.starve_check_every < 1:
            raise InvalidValueError("starve_check_every", self.starve_check_every, "at least 1")
        if self.max_prompt_tokens < 1:
            raise InvalidValueError("max_prompt_tokens", self.max_prompt_tokens, "at least 1")
        if self.kills and self.skip_join:
            raise InvalidValueError("kills", self.kills, "false with skip_join, whose iterations fit their quanta")


MLFQ_SWITCHES: Mapping[str, dict[str, bool]] = {
    "skip-join": {"skip_join": True, "kills": False},
    "no-preemption": {"skip_join": False, "kills": False},
    "preemption": {"skip_join": False, "kills": True},
}
"""Fields of ``MlfqRules`` by ``[scheduler] mlfq``: FastServe's own queue, and the baselines of its section 6.3."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Parameters of the parts; each part takes what it needs.

    Attributes:
        watermark: Share of the KV pool that the watermark admission fills, in (0, 1].
        overcommit: The conservative admission counts the pool as so many times its size.
        reserve_ratio: Share of the pool that Past-Future keeps free.
        history_window: w: finished requests whose lengths Past-Future predicts from.
        max_new_tokens: Output length that Past-Future expects before any request has finished.
        tail: How much of the mean the boosted order gives for the tail; as ``SchedulerConfig.tail``.
        max_pause_s: How long the boosted order lets a stream stand still; as ``SchedulerConfig.max_pause_s``.
        max_gap_s: As in ``StepBudget``.
        mlfq: Rules of the skip-join MLFQ.
        min_idle_slots: As in ``EnstOffload``.
        num_burst_levels: As in ``EnstOffload``.
        theta: Hysteresis of the Gittins order.
        gamma: Ageing of the Gittins order; as ``SchedulerConfig.gamma``.
        cost: Cost of steps until it has been measured.
        block_size: Tokens of a block, as placement by prefixes counts them.
        placement: As configured: parts and numbers of E2.
        seed: Random seed; the same seed gives the same draws.
    """

    watermark: float = 0.95
    overcommit: float = 1.0
    reserve_ratio: float = 0.05
    history_window: int = 1000
    max_new_tokens: int = 4096
    theta: float = 4.0
    gamma: float = 0.1
    tail: float = 1.0
    max_pause_s: float = 0.0
    max_gap_s: float = math.inf
    mlfq: MlfqRules = field(default_factory=MlfqRules)
    min_idle_slots: int = 1
    num_burst_levels: int = 2
    cost: StepCost = PRIOR_COST
    block_size: int = 64
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Parameters of batch mode.

    Attributes:
        memory_tokens: KV tokens of a worker (Theta / Delta of Magnus).
        serving_time_s: Estimated seconds of a batch of so many jobs, prompt tokens and output tokens.
        edges: Boundaries of the bins of predicted lengths.
        wma_threshold: Phi: most wasted memory accesses of a batch, in tokens.
        num_bins: Bins whose edges are learned from predicted lengths; 0: ``edges`` are given.
        max_wait_s: Seconds after which a bin that is not full becomes a batch as it is.
        batch_size: Most jobs of a batch; 0 for the preset's own number.
        max_num_seqs: Most jobs that a worker runs at once; no batch is larger.
        reload_s: Seconds for which a worker takes nothing after a batch of it has run out of memory.
    """

    memory_tokens: float
    serving_time_s: ServingTime
    edges: tuple[float, ...] = (0.0, math.inf)
    wma_threshold: float = 50_000
    num_bins: int = 0
    max_wait_s: float = math.inf
    batch_size: int = 0
    max_num_seqs: int | None = None
    reload_s: float = 0.0
