"""What the names in the presets table stand for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from core.config.scheduling import SchedulerConfig
from core.costs import A100_7B, StepCost
from core.errors import ConfigError
from core.placement_config import PlacementConfig
from policies.admission.conservative import Conservative
from policies.admission.forecast import ForecastAdmission
from policies.admission.past_future import HistoryLengths, PastFuture, TrueLengths
from policies.admission.watermark import Aggressive
from policies.batching.base import Batcher, first_arrived
from policies.batching.fcfs import FcfsBatches
from policies.batching.hrrn import HighestResponseRatio, HrrnOrder, ServingTime
from policies.batching.multi_bin import LearnedBins, MultiBinBatcher
from policies.batching.wma import WmaBatcher
from policies.external.scheduler import BackendScheduler
from policies.fleet.batch_scheduler import BatchScheduler
from policies.fleet.scheduler import GlobalScheduler
from policies.interfaces import Admission, KvPolicy, Order, ReplicaPolicies
from policies.job import Job
from policies.kv.cheapest_victim import CheapestVictim
from policies.kv.enst_baselines import Defer, Reactive, Recompute
from policies.kv.enst_offload import EnstOffload
from policies.kv.newest_first import NewestGiveWay
from policies.kv.split_batch import SplitBatch, WholeBatch
from policies.lengths.history import LengthHistory
from policies.order.fcfs import Fcfs
from policies.order.gittins import DecodePrice, Gittins
from policies.order.hit_groups import HitGroups
from policies.order.skip_join_mlfq import MlfqRules, SkipJoinMlfq
from policies.placement.base import Placement
from policies.placement.e2 import E2Config, E2Router
from policies.placement.e2_forecast import E2Forecast
from policies.placement.e2_profiles import from_step_cost
from policies.placement.least_work import LeastWork
from policies.placement.round_robin import RoundRobin
from policies.presets import PRESETS, Preset, find_preset
from policies.replica.scheduler import ReplicaScheduler, SchedulerLimits

_T = TypeVar("_T")

PRIOR_COST = A100_7B
"""What steps are taken to cost until they have been measured."""

GRANT_LEAD_S = 0.15
"""On a server: one and a half times what lies between two reports of a worker."""

PRIOR_CAPACITY = 100_000
"""KV tokens that a replica is taken to hold until it has said so."""


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
        gamma: Its ageing.
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
    gamma: float = 0.0
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
        num_bins: Bins whose edges are learned from the lengths foreseen; 0: ``edges`` are given.
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


def remaining_service_s(cost: StepCost, job: Job) -> float:
    """Seconds until a job would end if it ran alone: what is missing of its KV, then one step a token foreseen."""
    expected = job.max_new_tokens if job.forecast is None else min(job.forecast.mean, job.max_new_tokens)
    missing = job.missing_len
    prefill_s = cost.prefill_s(missing, job.known_len - missing)
    return prefill_s + max(1.0, expected - job.output_len) * cost.decode_s(job.known_len)


def _gittins(settings: PolicySettings, limits: SchedulerLimits) -> Gittins:
    price = DecodePrice(settings.cost, limits.max_num_seqs, PRIOR_CAPACITY)
    return Gittins(price, theta=settings.theta, gamma=settings.gamma)


def _past_future(settings: PolicySettings) -> PastFuture:
    rng = np.random.default_rng(settings.seed)
    history = LengthHistory(initial=[settings.max_new_tokens])
    return PastFuture(HistoryLengths(history, rng), reserve_ratio=settings.reserve_ratio)


HIT_GROUPS = "hit-groups"
"""The order that asks what is cached of the prompts that wait."""

ORDERS: dict[str, Callable[[PolicySettings, SchedulerLimits], Order]] = {
    "fcfs": lambda settings, limits: Fcfs(),
    "hrrn": lambda settings, limits: HrrnOrder(remaining_service_s, settings.cost),
    "gittins": lambda settings, limits: _gittins(settings, limits),
    HIT_GROUPS: lambda settings, limits: HitGroups(limits.max_num_seqs),
    "skip-join-mlfq": lambda settings, limits: SkipJoinMlfq(settings.cost, settings.mlfq),
}

ADMISSIONS: dict[str, Callable[[PolicySettings], Admission]] = {
    "watermark": lambda settings: Aggressive(settings.watermark),
    "conservative": lambda settings: Conservative(settings.overcommit),
    "past-future": _past_future,
    "oracle": lambda settings: PastFuture(TrueLengths(), reserve_ratio=0.0, max_lists=1),
}

FORECAST = "forecast"
"""The admission that asks the Gittins order for the laws of its jobs."""

_MLFQ_KV: dict[str, Callable[[SkipJoinMlfq], KvPolicy]] = {
    "enst-proactive": EnstOffload,
    "enst-defer": Defer,
    "enst-reactive": Reactive,
    "enst-recompute": Recompute,
}

CHEAPEST_VICTIM = "cheapest-victim"
"""The KV policy that asks the Gittins order for ranks."""

PLACEMENTS: dict[str, Callable[[PolicySettings], Placement]] = {
    "round-robin": lambda settings: RoundRobin(),
    "least-work": lambda settings: LeastWork(),
    "e2": lambda settings: E2Router(from_step_cost(settings.cost), settings.block_size, settings.e2),
    "e2-forecast": lambda settings: E2Forecast(settings.cost, settings.block_size, settings.e2.max_tree_bytes),
}

BATCHERS: dict[str, Callable[[BatchSettings, int | None], Batcher]] = {
    "fcfs-batches": lambda settings, size: FcfsBatches(size or 1),
    "wma-hrrn": lambda settings, size: WmaBatcher(
        settings.memory_tokens, HighestResponseRatio(settings.serving_time_s), settings.wma_threshold, size
    ),
    "wma-fcfs": lambda settings, size: WmaBatcher(settings.memory_tokens, first_arrived, settings.wma_threshold, size),
    "multi-bin": lambda settings, size: _bins(settings, size or 1),
}


def _bins(settings: BatchSettings, size: int) -> Batcher:
    if settings.num_bins:
        return LearnedBins(settings.num_bins, size, settings.max_wait_s)
    return MultiBinBatcher(settings.edges, size, settings.max_wait_s)


def build_router(preset: str, placement: str = "", settings: PolicySettings | None = None) -> GlobalScheduler:
    """The scheduler over replicas; ``placement`` overrides the preset's own.

    Raises:
        ConfigError: there is no such preset or placement.
    """
    return GlobalScheduler(_placement(preset, placement, settings or PolicySettings()))


def _placement(preset: str, placement: str, settings: PolicySettings) -> Placement:
    return _part(PLACEMENTS, "scheduler.placement", placement or _continuous(preset).placement)(settings)


def placement_of(config: SchedulerConfig) -> str:
    """Name of the placement on a server.

    Raises:
        ConfigError: there is no such preset.
    """
    return config.placement or find_preset(config.preset).placement


def build_scheduler(
    preset: str,
    limits: SchedulerLimits,
    settings: PolicySettings | None = None,
    *,
    order: str = "",
    admission: str = "",
    kv: str = "",
) -> ReplicaScheduler:
    """The scheduler of one replica under a preset; a part that is named overrides the preset's own.

    Raises:
        ConfigError: there is no such preset or part, or the parts do not go together.
    """
    row, settings = _continuous(preset), settings or PolicySettings()
    if row.max_num_seqs:
        limits = replace(limits, max_num_seqs=min(limits.max_num_seqs, row.max_num_seqs))
    ranked = _part(ORDERS, "scheduler.order", order or row.order)(settings, limits)
    admits = _admission(admission or row.admission, ranked, settings)
    return ReplicaScheduler(ReplicaPolicies(ranked, admits, _kv_policy(kv or row.kv, ranked)), limits)


def configured_replica(config: SchedulerConfig, max_num_seqs: int) -> ReplicaScheduler:
    """The scheduler of one replica as the configuration of a server says, in either mode.

    Raises:
        ConfigError: there is no such preset.
    """
    if is_batch_mode(config.preset):
        return build_batch_runner(max_num_seqs)
    return configured_scheduler(config, max_num_seqs, GRANT_LEAD_S)


def configured_backend(config: SchedulerConfig, max_num_seqs: int) -> BackendScheduler:
    """The scheduler of a replica that is another server: its order is that of the preset, the rest is the server's.

    Raises:
        ConfigError: there is no such preset or order, or the preset is not of continuous batching.
    """
    order = config.order or _continuous(config.preset).order
    limits = SchedulerLimits(max_num_seqs, 0)
    return BackendScheduler(_part(ORDERS, "scheduler.order", order)(configured_settings(config), limits), max_num_seqs)


def check_scheduler(config: SchedulerConfig) -> None:
    """Refuses before anything starts a composition that could not be served.

    Raises:
        ConfigError: there is no such preset or part, or they do not go together.
    """
    if not is_batch_mode(config.preset):
        configured_scheduler(config, 1)
        build_router(config.preset, config.placement)
        return
    if config.placement:
        raise ConfigError("scheduler.placement", config.placement, "nothing: under this preset idle workers pull")
    for part in ("order", "admission", "kv"):
        value = getattr(config, part)
        if value:
            expected = f"nothing: preset {config.preset!r} forms batches in one queue, replicas decide nothing"
            raise ConfigError(f"scheduler.{part}", value, expected)


def configured_scheduler(config: SchedulerConfig, max_num_seqs: int, grant_lead_s: float = 0.0) -> ReplicaScheduler:
    """The scheduler of a single worker, or of one replica, as the configuration says.

    Args:
        grant_lead_s: As in ``SchedulerLimits``.

    Raises:
        ConfigError: there is no such preset or part, the parts do not go together, or the preset is not of continuous
            batching or not executed so.
    """
    if config.execution == "static":
        batching = ", ".join(name for name, preset in PRESETS.items() if preset.mode == "batch")
        expected = f"ragged with preset {config.preset!r}; batches are formed by {batching}"
        raise ConfigError("scheduler.execution", config.execution, expected)
    limits = SchedulerLimits(max_num_seqs, config.standby_slots, grant_lead_s)
    parts = {"order": config.order, "admission": config.admission, "kv": config.kv}
    return build_scheduler(config.preset, limits, configured_settings(config), **parts)


def configured_settings(config: SchedulerConfig) -> PolicySettings:
    """What the parts go by on a server until it has measured more."""
    mlfq = MlfqRules(config.quantum_s, follows_cost=True, starve_limit_s=config.starve_limit_s)
    return PolicySettings(watermark=config.watermark, gamma=config.gamma, mlfq=mlfq)


def configured_e2(config: PlacementConfig) -> E2Config:
    """What of E2 a server uses."""
    return E2Config(
        window_s=config.window_s,
        rebalance=config.rebalance,
        rebalance_ratio=config.rebalance_ratio,
        autoscale=config.autoscale,
        balance=config.balance,
        max_tree_bytes=config.max_tree_mib << 20,
    )


def swaps_kv(config: SchedulerConfig) -> bool:
    """Whether workers need a host pool: the KV policy moves KV there.

    Raises:
        ConfigError: as ``configured_scheduler``.
    """
    return not is_batch_mode(config.preset) and configured_scheduler(config, 1).turns.kv.swaps


def follows_prefixes(config: SchedulerConfig) -> bool:
    """Whether anybody decides by what workers cache: placement, or the order of a replica.

    Raises:
        ConfigError: as ``build_router``.
    """
    if is_batch_mode(config.preset):
        return False
    order = config.order or _continuous(config.preset).order
    return order == HIT_GROUPS or _placement(config.preset, config.placement, PolicySettings()).block_size > 0


def _admission(name: str, order: Order, settings: PolicySettings) -> Admission:
    if name != FORECAST:
        return _part(ADMISSIONS, "scheduler.admission", name, FORECAST)(settings)
    if not isinstance(order, Gittins):
        raise ConfigError("scheduler.admission", name, f"one of {', '.join(ADMISSIONS)} where the order is not gittins")
    rng = np.random.default_rng(settings.seed)
    return ForecastAdmission(order.lengths, rng, eviction_risk=settings.eviction_risk)


def _kv_policy(name: str, order: Order) -> KvPolicy:
    newest = ("recompute-newest", "swap-newest")
    if name in newest:
        return NewestGiveWay(swaps=name == "swap-newest")
    if name == CHEAPEST_VICTIM and isinstance(order, Gittins):
        return CheapestVictim(order)
    make = _part(_MLFQ_KV, "scheduler.kv", name, *newest, CHEAPEST_VICTIM)
    if not isinstance(order, SkipJoinMlfq):
        raise ConfigError("scheduler.kv", name, f"one of {', '.join(newest)} where the order is not skip-join-mlfq")
    return make(order)


def build_batcher(preset: str, settings: BatchSettings) -> Batcher:
    """The central queue of a batch-mode preset.

    Raises:
        ConfigError: there is no such preset, or it is not of batch mode.
    """
    row = find_preset(preset)
    if row.mode != "batch":
        raise ConfigError("scheduler.preset", preset, "a preset of batch mode")
    size = settings.batch_size or row.max_num_seqs or settings.max_num_seqs
    if size is not None and settings.max_num_seqs is not None:
        size = min(size, settings.max_num_seqs)
    return BATCHERS[row.order](settings, size)


def build_batch_scheduler(preset: str, settings: BatchSettings, forecast_wait_s: float = 0.0) -> BatchScheduler:
    """The scheduler over replicas of a batch-mode preset.

    Raises:
        ConfigError: there is no such preset, or it is not of batch mode.
    """
    return BatchScheduler(build_batcher(preset, settings), settings.serving_time_s, forecast_wait_s)


def build_batch_runner(max_num_seqs: int) -> ReplicaScheduler:
    """The scheduler of one replica in batch mode: it runs what it is given, all of it or nothing."""
    return ReplicaScheduler(ReplicaPolicies(Fcfs(), WholeBatch(), SplitBatch()), SchedulerLimits(max_num_seqs, 0))


def is_batch_mode(preset: str) -> bool:
    """Whether idle workers pull batches under this preset.

    Raises:
        ConfigError: there is no such preset.
    """
    return find_preset(preset).mode == "batch"


def _continuous(preset: str) -> Preset:
    row = find_preset(preset)
    if row.mode != "continuous":
        raise ConfigError("scheduler.preset", preset, "a preset of continuous batching; this one forms static batches")
    return row


def _part(table: Mapping[str, _T], field_name: str, name: str, *others: str) -> _T:
    """The entry of this name; the error names ``others`` as well, which are made elsewhere."""
    if name not in table:
        raise ConfigError(field_name, name, f"one of {', '.join((*table, *others))}")
    return table[name]
