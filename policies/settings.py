"""Settings of the parts: what ``core.config`` and the simulator fill in, and each part takes what it needs of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from core.costs import A100_7B, StepCost
from core.errors import InvalidValueError

PRIOR_COST = A100_7B
"""What steps are taken to cost until they have been measured."""

PRIOR_CAPACITY = 100_000
"""KV tokens that a replica is taken to hold until it has said so."""

MAX_TREE_BYTES = 256 << 20
"""Memory of the tree, unless told otherwise: about 1 M blocks of prompts that share little."""

ServingTime = Callable[[int, int, int], float]
"""(batch size, L(B) tokens, G(B) tokens) -> estimated seconds."""


@dataclass(frozen=True, slots=True)
class MlfqRules:
    """The parameters of the scheduler; the defaults are those of FastServe's artifact where it has one.

    Attributes:
        quantum_s: q_1, the quantum of level 1; the shortest iteration time of the model.
        follows_cost: q_1 becomes that time as it is measured (``price``), ``quantum_s`` its lower bound.
        ratio: Of the quanta of neighbouring levels.
        num_levels: K; the last level is then unbounded. None: levels are made on demand.
        starve_limit_s: Who has waited so long is promoted to level 1; infinity for never.
        starve_check_every: Scheduling points from one look at the waiting times to the next (artifact: 1000). Under
            lasting overload a rare look keeps the promoted from filling level 1.
        max_prompt_tokens: Prompt tokens of one iteration (artifact: 2048). Who lacks a prefill beyond that goes after
            all others of its urgency: it could not compute yet, and would only take the memory of those that can.
        skip_join: Whether prefills are predicted. Without, every job joins at level 1 and sinks level by level
            (the paper's MLFQ-no-preemption, and MLFQ-preemption with ``kills``).
        kills: Whoever carries out an iteration has to cut it off when ``slice_s`` is over: the work of that
            iteration is lost, its time counts as attained. Without, iterations are never interrupted.
        strict: Quanta have to be larger than the iteration that joins, and exceeded before a job sinks (the letter of
            the text, and the artifact). By default equality is enough, which alone gives the numbers of Fig. 6.
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


@dataclass(frozen=True, slots=True)
class E2Config:
    """What of E2 is used, and its constants.

    Attributes:
        window_s: H, seconds over which load, sharing and queueing are counted.
        imbalance_ratio: IMBALR: a replica whose load is decoding to more than this share is sent what is explored ...
        balanced_ratio: ... if another replica with load is below this share.
        rebalance_ratio: T_hbal: a load may be so many times the lightest.
        rebalance_after: Requests of the window that a replica has before its load is compared.
        initial_output_len: Tokens, of replicas where nothing ended within the window.
        balance: Whether prefill and decode loads are balanced at all.
        rebalance: Whether exploiting requests of replicas that are too heavy are redirected.
        autoscale: Whether prefixes whose queueing time doubles on a replica too heavy may go to one more.
        max_tree_bytes: As ``PrefixLoads`` takes it.
    """

    window_s: float = 180.0
    imbalance_ratio: float = 0.8
    balanced_ratio: float = 0.5
    rebalance_ratio: float = 1.5
    rebalance_after: int = 50
    initial_output_len: float = 200.0
    balance: bool = True
    rebalance: bool = True
    autoscale: bool = True
    max_tree_bytes: int = MAX_TREE_BYTES

    def __post_init__(self) -> None:
        _require(self.window_s > 0, "window_s", self.window_s, "seconds > 0")
        _require(0 < self.imbalance_ratio <= 1, "imbalance_ratio", self.imbalance_ratio, "a share in (0, 1]")
        _require(0 <= self.balanced_ratio <= 1, "balanced_ratio", self.balanced_ratio, "a share in [0, 1]")
        _require(self.rebalance_ratio >= 1, "rebalance_ratio", self.rebalance_ratio, "a ratio >= 1")
        _require(self.rebalance_after >= 0, "rebalance_after", self.rebalance_after, "an integer >= 0")
        _require(self.max_tree_bytes >= 1, "max_tree_bytes", self.max_tree_bytes, "bytes >= 1")
        _require(self.initial_output_len >= 0, "initial_output_len", self.initial_output_len, "tokens >= 0")


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Parameters of the parts; each part takes what it needs.

    Attributes:
        watermark: Share of the KV pool that the watermark admission fills, in (0, 1].
        overcommit: How many times its memory the conservative admission takes the pool to have.
        reserve_ratio: Share of the pool that Past-Future keeps free.
        max_new_tokens: The longest output that Past-Future expects before it has seen any.
        eviction_risk: What the admission by forecast accepts.
        mlfq: Rules of the skip-join MLFQ.
        theta: Hysteresis of the Gittins order.
        gamma: Its ageing; as ``SchedulerConfig.gamma``.
        cost: What steps cost; replaced where it is measured.
        block_size: Tokens of a block as placement by prefixes counts them.
        e2: What of E2 is used.
        seed: Of everything that is drawn.
    """

    watermark: float = 0.95
    overcommit: float = 1.0
    reserve_ratio: float = 0.05
    max_new_tokens: int = 4096
    eviction_risk: float = 0.05
    theta: float = 4.0
    gamma: float = 0.1
    mlfq: MlfqRules = field(default_factory=MlfqRules)
    cost: StepCost = PRIOR_COST
    block_size: int = 64
    e2: E2Config = field(default_factory=E2Config)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Parameters of batch mode.

    Attributes:
        memory_tokens: KV tokens of a worker (Theta / Delta of Magnus).
        serving_time_s: Estimated seconds of a batch of so many jobs, prompt tokens and output tokens.
        edges: Boundaries of the bins of predicted lengths.
        wma_threshold: Phi.
        num_bins: Bins whose edges are learned from predicted lengths; 0: ``edges`` are given.
        max_wait_s: Longest wait of a bin for company.
        batch_size: Jobs of a batch at most; 0 for the preset's own.
        max_num_seqs: What a worker can run at once; no batch is larger.
    """

    memory_tokens: float
    serving_time_s: ServingTime
    edges: tuple[float, ...] = (0.0, math.inf)
    wma_threshold: float = 50_000
    num_bins: int = 0
    max_wait_s: float = math.inf
    batch_size: int = 0
    max_num_seqs: int | None = None


def _require(ok: bool, field: str, value: object, expected: str) -> None:
    if not ok:
        raise InvalidValueError(field, value, expected)
