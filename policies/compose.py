"""Builds schedulers from a preset or a configuration out of registered parts."""

from __future__ import annotations

import math
from dataclasses import replace

from farsight.core.config.load import FarsightConfig
from farsight.core.config.scheduling import BatchConfig, SchedulerConfig
from farsight.core.errors import ConfigError
from farsight.policies.batching.base import BATCHERS, BatchContext, BatchPolicy
from farsight.policies.external.scheduler import BackendScheduler
from farsight.policies.fleet.batch_scheduler import BatchScheduler
from farsight.policies.fleet.scheduler import GlobalScheduler
from farsight.policies.interfaces import ADMISSIONS, KV_POLICIES, ORDERS, ReplicaContext, ReplicaPolicies
from farsight.policies.kv.split_batch import SplitBatch, WholeBatch
from farsight.policies.moves.recall import RecallRule
from farsight.policies.order.fcfs import Fcfs
from farsight.policies.order.offload_orders import OffloadDecider, told
from farsight.policies.placement.base import PLACEMENTS, Placement
from farsight.policies.presets import PRESETS, Preset, find_preset, max_running
from farsight.policies.replica.planner import StepBudget
from farsight.policies.replica.scheduler import ReplicaScheduler, SchedulerLimits
from farsight.policies.settings import BatchSettings, PolicySettings, ServingTime

GRANT_LEAD_S = 0.15
"""Grant lead on a server: 1.5 times the interval between two reports of a worker."""


def build_router(
    preset: str, placement: str = "", settings: PolicySettings | None = None, places: int = 0
) -> GlobalScheduler:
    """Returns the scheduler over replicas; ``placement`` overrides the preset's own.

    Args:
        places: Most requests that a replica runs at once; 0 where that is unknown, and nothing is recalled.

    Raises:
        ConfigError: There is no such preset or placement.
    """
    settings = settings or PolicySettings()
    rule = RecallRule(max_running(preset, places)) if settings.placement.recall and places else None
    return GlobalScheduler(_placement(preset, placement, settings), rule)


def _placement(preset: str, placement: str, settings: PolicySettings) -> Placement:
    return PLACEMENTS.find(placement or _continuous(preset).placement).build(settings)


def placement_of(config: SchedulerConfig) -> str:
    """Returns the name of the placement on a server.

    Raises:
        ConfigError: There is no such preset.
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
    """Returns the scheduler of one replica under a preset; a part that is named overrides the preset's own.

    Raises:
        ConfigError: There is no such preset or part, or the parts do not go together.
    """
    row, settings = _continuous(preset), settings or PolicySettings()
    if row.max_num_seqs:
        limits = replace(limits, max_num_seqs=min(limits.max_num_seqs, row.max_num_seqs))
    max_gap_ms = settings.scheduler.max_gap_ms
    limits = replace(limits, budget=StepBudget(max_gap_ms / 1e3 if max_gap_ms else math.inf))
    order = order or row.order
    context = ReplicaContext(settings, limits.max_num_seqs)
    part = ORDERS.find(order)
    ranked = part.build(context)
    context = replace(context, order=ranked)
    admits = ADMISSIONS.find(admission or row.admission, *part.goes_as).build(context)
    moves = KV_POLICIES.find(kv or row.kv, *part.goes_as).build(context)
    return ReplicaScheduler(ReplicaPolicies(ranked, admits, moves), limits)


def configured_replica(
    config: SchedulerConfig, max_num_seqs: int, known: PolicySettings | None = None, *, asks: bool = True
) -> ReplicaScheduler:
    """Returns the scheduler of one replica by a server's configuration, in either mode.

    Args:
        known: The settings with what has been measured of this server; None before any measurement.
        asks: Whether the scheduler asks a KVOffloadManager (``configured_offload``) rather than decide at once.

    Raises:
        ConfigError: There is no such preset.
    """
    deadline_s = config.offload_deadline_ms / 1e3 if asks and configured_offload(config, max_num_seqs) else 0.0
    if is_batch_mode(config.preset):
        return build_batch_runner(max_num_seqs, deadline_s)
    return configured_scheduler(config, max_num_seqs, GRANT_LEAD_S, deadline_s, known)


def configured_offload(
    config: SchedulerConfig, max_num_seqs: int, known: PolicySettings | None = None
) -> OffloadDecider | None:
    """Returns the decider of a KVOffloadManager by a server's configuration, in either mode. None if the KV policy
    reads the order of another package, whose state no question carries: then the Scheduler decides alone.

    Raises:
        ConfigError: There is no such preset or part, or the parts do not go together.
    """
    if is_batch_mode(config.preset):
        return OffloadDecider(SplitBatch(), None)
    settings = known or PolicySettings(config)
    return build_offload(config.preset, max_num_seqs, settings, order=config.order, kv=config.kv)


def build_offload(
    preset: str, max_num_seqs: int, settings: PolicySettings | None = None, *, order: str = "", kv: str = ""
) -> OffloadDecider | None:
    """Returns the KV decider for a scheduler that ``build_scheduler`` made of the same parts; None as above.

    Raises:
        ConfigError: As in ``build_scheduler``.
    """
    row = _continuous(preset)
    part = ORDERS.find(order or row.order)
    moves = KV_POLICIES.find(kv or row.kv, *part.goes_as)
    context = ReplicaContext(settings or PolicySettings(), max_num_seqs)
    seen = told(part.build(context))
    if moves.needs and seen is None:
        return None
    return OffloadDecider(moves.build(replace(context, order=seen)), seen)


def configured_backend(config: SchedulerConfig, max_num_seqs: int) -> BackendScheduler:
    """Returns the scheduler of an external server: the preset gives its order, the server decides the rest.

    Raises:
        ConfigError: there is no such preset or order, or the preset is not of continuous batching.
    """
    order = ORDERS.find(config.order or _continuous(config.preset).order)
    return BackendScheduler(order.build(ReplicaContext(PolicySettings(config), max_num_seqs)), max_num_seqs)


def check_scheduler(config: SchedulerConfig) -> None:
    """Refuses a composition that could not be served, before anything starts.

    Raises:
        ConfigError: there is no such preset or part, or they do not go together.
    """
    if not is_batch_mode(config.preset):
        configured_scheduler(config, 1)
        build_router(config.preset, config.placement)
        return
    if config.placement:
        raise ConfigError(
            "scheduler.placement", config.placement, "no placement: under this preset idle workers pull batches"
        )
    for part in ("order", "admission", "kv"):
        value = getattr(config, part)
        if value:
            expected = f"no value: preset {config.preset!r} forms batches in one queue, so replicas decide nothing"
            raise ConfigError(f"scheduler.{part}", value, expected)


def configured_scheduler(
    config: SchedulerConfig,
    max_num_seqs: int,
    grant_lead_s: float = 0.0,
    offload_deadline_s: float = 0.0,
    known: PolicySettings | None = None,
) -> ReplicaScheduler:
    """Returns the scheduler of a single worker, or of one replica, as the configuration says.

    Args:
        grant_lead_s, offload_deadline_s: As in ``SchedulerLimits``.
        known: As for ``configured_replica``.

    Raises:
        ConfigError: there is no such preset or part, the parts do not go together, or the preset is not of continuous
            batching or not executed so.
    """
    if config.execution == "static":
        batching = ", ".join(name for name, preset in PRESETS.items() if preset.mode == "batch")
        expected = f"ragged with preset {config.preset!r}; batches are formed by {batching}"
        raise ConfigError("scheduler.execution", config.execution, expected)
    limits = SchedulerLimits(max_num_seqs, config.standby_slots, grant_lead_s, offload_deadline_s=offload_deadline_s)
    parts = {"order": config.order, "admission": config.admission, "kv": config.kv}
    return build_scheduler(config.preset, limits, known or PolicySettings(config), **parts)


def swaps_kv(config: SchedulerConfig) -> bool:
    """Returns whether workers need a host pool, because the KV policy moves KV there.

    Raises:
        ConfigError: as ``configured_scheduler``.
    """
    return not is_batch_mode(config.preset) and KV_POLICIES.find(config.kv or _continuous(config.preset).kv).swaps


def is_steady(config: SchedulerConfig) -> bool:
    """Returns whether replica schedulers keep their decision until a request arrives or ends; not used in batch mode.

    Raises:
        ConfigError: As ``configured_scheduler``.
    """
    row = find_preset(config.preset)
    if row.mode == "batch":
        return False
    return ORDERS.find(config.order or row.order).steady and ADMISSIONS.find(config.admission or row.admission).steady


def follows_prefixes(config: SchedulerConfig) -> bool:
    """Returns whether a part (the placement, or the order of a replica) decides by the workers' prefix caches.

    Raises:
        ConfigError: as ``build_router``.
    """
    if is_batch_mode(config.preset):
        return False
    row = _continuous(config.preset)
    order, placement = ORDERS.find(config.order or row.order), PLACEMENTS.find(config.placement or row.placement)
    return order.uses_prefixes or placement.uses_prefixes


def predicts_requests(config: FarsightConfig) -> bool:
    """Returns whether each request gets a forecast of its own: an artefact is given, or a part reads forecasts.

    Raises:
        ConfigError: There is no such preset or part.
    """
    if config.predictor.artefact:
        return True
    return config.predictor.from_traffic and _reads_forecasts(config.scheduler)


def _reads_forecasts(config: SchedulerConfig) -> bool:
    row = find_preset(config.preset)
    if row.mode == "batch":
        return BATCHERS.find(row.order).reads_forecasts
    order = ORDERS.find(config.order or row.order)
    placement = PLACEMENTS.find(config.placement or row.placement)
    admission = ADMISSIONS.find(config.admission or row.admission)
    return order.reads_forecasts or placement.reads_forecasts or admission.reads_forecasts


def forecasting_presets() -> tuple[str, ...]:
    """Returns the presets that read a forecast of each request."""
    return tuple(name for name in PRESETS if _reads_forecasts(SchedulerConfig(preset=name)))


def build_batcher(preset: str, settings: BatchSettings) -> BatchPolicy:
    """Returns the central queue of a batch-mode preset.

    Raises:
        ConfigError: there is no such preset, or it is not of batch mode.
    """
    row = find_preset(preset)
    if row.mode != "batch":
        raise ConfigError("scheduler.preset", preset, "a preset of batch mode")
    size = settings.batch.batch_size or row.max_num_seqs or settings.max_num_seqs
    if size is not None and settings.max_num_seqs is not None:
        size = min(size, settings.max_num_seqs)
    return BATCHERS.find(row.order).build(BatchContext(settings, size))


def build_batch_scheduler(preset: str, settings: BatchSettings, forecast_wait_s: float = 0.0) -> BatchScheduler:
    """Returns the scheduler over replicas of a batch-mode preset.

    Raises:
        ConfigError: there is no such preset, or it is not of batch mode.
    """
    batcher = build_batcher(preset, settings)
    return BatchScheduler(batcher, settings.serving_time_s, forecast_wait_s, settings.batch.reload_s)


def configured_batch_scheduler(
    config: SchedulerConfig,
    batch: BatchConfig,
    max_num_seqs: int,
    serving_time_s: ServingTime,
    forecast_wait_s: float = 0.0,
) -> BatchScheduler:
    """Returns the scheduler over replicas in batch mode as the configuration of a server says.

    Raises:
        ConfigError: there is no such preset, or it is not of batch mode.
    """
    # Memory is unknown until a worker reports its capacity.
    settings = BatchSettings(math.inf, serving_time_s, batch, max_num_seqs=max_num_seqs)
    return build_batch_scheduler(config.preset, settings, forecast_wait_s)


def build_batch_runner(max_num_seqs: int, offload_deadline_s: float = 0.0) -> ReplicaScheduler:
    """Returns the scheduler of one replica in batch mode, which runs a given batch as a whole or not at all."""
    limits = SchedulerLimits(max_num_seqs, 0, gives_way=False, offload_deadline_s=offload_deadline_s)
    return ReplicaScheduler(ReplicaPolicies(Fcfs(), WholeBatch(), SplitBatch()), limits)


def is_batch_mode(preset: str) -> bool:
    """Returns whether idle workers pull batches under this preset.

    Raises:
        ConfigError: There is no such preset.
    """
    return find_preset(preset).mode == "batch"


def _continuous(preset: str) -> Preset:
    row = find_preset(preset)
    if row.mode != "continuous":
        raise ConfigError("scheduler.preset", preset, "a preset of continuous batching; this one forms static batches")
    return row
