"""An experiment, run to its last token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from farsight.core.errors import IntegrityError, InvalidValueError
from farsight.core.request import NO_SLO, is_flex
from farsight.estimator.knn import padded_batch_s
from farsight.policies.compose import (
    build_router,
    configured_batch_scheduler,
    configured_offload,
    configured_replica,
    is_batch_mode,
    is_steady,
)
from farsight.policies.fleet.scheduler import FleetMachine
from farsight.policies.fleet.sessions import SessionTable
from farsight.policies.order.offload_orders import OffloadDecider
from farsight.policies.replica.scheduler import ReplicaScheduler
from farsight.policies.settings import PolicySettings
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.memory_below import NOTHING_BELOW, MemoryBelow
from farsight.simulator.cluster.records import Record, Recorder, Timeline
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.experiment import KEPT_STATES, Experiment, num_states, spacing_of_states
from farsight.simulator.summary import Summary, summarize
from farsight.simulator.traffic.workload import SimRequest, Source, Workload

ANNOUNCE_S = 0.5
"""Interval at which a server's ingress replicas announce their open streams."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The result of a run.

    Attributes:
        failed: Ids of requests that no replica could ever hold.
    """

    recorder: Recorder
    failed: tuple[str, ...]
    summary: Summary


def run(
    experiment: Experiment,
    arrivals: Workload,
    *,
    progress: Callable[[int], None] | None = None,
    timeline: Timeline | None = None,
    looks_often: bool = True,
) -> RunOutcome:
    """Runs an experiment to its last token.

    Args:
        arrivals: From ``make_arrivals``; several runs may share them.
        progress: Called from time to time with the number of ended requests.
        timeline: Samples the replicas as time goes on.
        looks_often: Whether a preset that is not steady decides after every step; else after ``LOOK_EVERY`` steps.

    Raises:
        IntegrityError: The preset left requests waiting for ever.
    """
    shape = _replica_shape(experiment, arrivals)
    shape = shape if looks_often else _looking_seldom(shape)
    fleet = _fleet(experiment, shape, _longest(arrivals), timeline)
    recorder, failed = fleet.run(arrivals, progress), fleet.refused
    if num_lost := len(arrivals) - len(recorder.done) - len(failed):
        raise IntegrityError(f"preset {experiment.preset}: {num_lost} of {len(arrivals)} requests never ended")
    num_computed = sum(usage.num_output_tokens for usage in recorder.usage.values())
    summary = summarize(
        recorder,
        shape,
        experiment.latency,
        experiment.sla,
        num_failed=len(failed),
        num_padding_tokens=num_computed - sum(record.num_tokens for record in recorder.done),
        num_images_encoded=fleet.encoder.num_encoded,
        mean_replicas=fleet.replica_s / fleet.now if fleet.now else float(experiment.num_replicas),
    )
    return RunOutcome(recorder, tuple(failed), summary)


LOOK_EVERY = 16
"""Steps between two looks at a preset that is not steady, where an answer is to come soon: the look costs the most."""


def run_until(experiment: Experiment, arrivals: Workload, request_id: str) -> Record:
    """Runs an experiment until one of its requests has ended.

    Raises:
        InvalidValueError: The request is not among the arrivals, or fits no replica.
    """
    shape = _looking_seldom(_replica_shape(experiment, arrivals))
    for record in _fleet(experiment, shape, _longest(arrivals)).run(arrivals, until=request_id).done[::-1]:
        if record.arrival.request_id == request_id:
            return record
    raise InvalidValueError("request", request_id, "one of the requests, which fits a replica")


def _looking_seldom(shape: ReplicaShape) -> ReplicaShape:
    return replace(shape, look_every=min(1, shape.look_every) * LOOK_EVERY)


def _replica_shape(experiment: Experiment, arrivals: Workload) -> ReplicaShape:
    states = num_states(experiment)  # with them nothing moves to the host
    return ReplicaShape(
        num_blocks=experiment.kv_tokens // experiment.block_size,
        block_size=experiment.block_size,
        num_host_blocks=0 if states else experiment.host_kv_tokens // experiment.block_size,
        num_states=states,
        kept_states=KEPT_STATES if states else 0,
        state_spacing=spacing_of_states(experiment),
        max_num_seqs=experiment.max_num_seqs,
        max_batch_tokens=experiment.max_batch_tokens,
        look_every=0 if is_steady(experiment.scheduler) and not _any_gives_way(arrivals) else 1,
        shares_prefixes=any(each.prefix or any(image.name for image in each.images) for each in arrivals),
        execution="static" if experiment.scheduler.execution == "static" else "ragged",
        offload_hop_s=experiment.offload_hop_s or 0.0,
    )


def _any_gives_way(arrivals: Workload) -> bool:
    """Whether time alone may change what a preset decides: requests that cannot wait longer, or may compute again."""
    return any(each.deadline_s is not None or each.slo is not NO_SLO or is_flex(each.priority) for each in arrivals)


def _longest(arrivals: Workload) -> int:
    return max((arrival.max_new_tokens for arrival in arrivals), default=1)


def run_source(
    experiment: Experiment,
    source: Iterable[SimRequest] | Source,
    max_new_tokens: int,
    *,
    below: MemoryBelow = NOTHING_BELOW,
    progress: Callable[[int], None] | None = None,
) -> Fleet:
    """Runs requests that wait for the answers to others, to the last token; they share prefixes, and sessions count.

    Args:
        max_new_tokens: Longest output that a client allows.
        below: Tiers below the device's pool.

    Returns:
        The fleet after its run: its ``recorder``, ``sessions`` and ``refused`` requests.
    """
    size = experiment.block_size
    shape = ReplicaShape(
        num_blocks=experiment.kv_tokens // size,
        block_size=size,
        max_num_seqs=experiment.max_num_seqs,
        max_batch_tokens=experiment.max_batch_tokens,
        look_every=0 if is_steady(experiment.scheduler) else LOOK_EVERY,
        shares_prefixes=True,
        tells_cache=True,
        below=below,
    )
    fleet = _fleet(experiment, shape, max_new_tokens, sessions=SessionTable(size))
    fleet.run(source, progress)
    return fleet


def _fleet(
    experiment: Experiment,
    shape: ReplicaShape,
    max_new_tokens: int,
    timeline: Timeline | None = None,
    sessions: SessionTable | None = None,
) -> Fleet:
    """The same for both modes but for the scheduler over replicas.

    Batch mode is as on a server, but for its estimates of batches: from step costs, not learned from what ran.
    """
    settings = PolicySettings(
        experiment.scheduler,
        placement=experiment.placement,
        max_new_tokens=max_new_tokens,
        cost=experiment.latency.cost,
        block_size=experiment.block_size,
    )
    config, asks = experiment.scheduler, experiment.offload_hop_s is not None
    first_seed = experiment.seed * experiment.num_replicas

    def make_scheduler(index: int) -> ReplicaScheduler:
        own = replace(settings, seed=first_seed + index)
        return configured_replica(config, experiment.max_num_seqs, own, asks=asks)

    def make_offload(index: int) -> OffloadDecider | None:
        return configured_offload(config, experiment.max_num_seqs, replace(settings, seed=first_seed + index))

    machine: FleetMachine
    if is_batch_mode(config.preset):
        batch_s, announce_s = partial(padded_batch_s, experiment.latency), ANNOUNCE_S
        machine = configured_batch_scheduler(config, experiment.batch, experiment.max_num_seqs, batch_s)
    else:
        machine, announce_s = build_router(config.preset, config.placement, settings, experiment.max_num_seqs), 0.0
    return Fleet(
        FleetShape(shape, experiment.latency, experiment.num_replicas, announce_s, scaling=experiment.scaling),
        machine,
        make_scheduler,
        clients=experiment.clients,
        timeline=timeline,
        make_offload=make_offload,
        sessions=sessions,
    )
