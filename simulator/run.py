"""An experiment, run to its last token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from core.errors import IntegrityError, InvalidValueError
from policies.batching.multi_bin import sample_edges
from policies.compose import build_batcher, build_router, build_scheduler, is_steady
from policies.presets import find_preset
from policies.replica.scheduler import ReplicaScheduler, SchedulerLimits
from policies.settings import BatchSettings, PolicySettings
from simulator.cluster.batch_fleet import BatchFleet, StaticExecution
from simulator.cluster.fleet import Fleet, FleetShape
from simulator.cluster.latency import LatencyModel
from simulator.cluster.records import Recorder
from simulator.cluster.replica import ReplicaShape
from simulator.cluster.timeline import Timeline
from simulator.experiment import Experiment
from simulator.summary import Summary, summarize
from simulator.traffic.workload import Workload

NUM_BINS = 8
"""Of Multi-Bin: of equal mass by the lengths that are foreseen."""
RELOAD_S = 10.0
"""After a static batch ran out of memory: weights of 13 GB at 1.3 GB/s."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run leaves.

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
) -> Outcome:
    """To the last token.

    Args:
        arrivals: Of ``make_arrivals``, which several runs may share.
        progress: Told how many requests have ended, now and then.
        timeline: Samples the replicas as time goes on; not in batch mode.

    Raises:
        InvalidValueError: A closed loop of a batch-mode preset.
        IntegrityError: The preset left requests waiting for ever.
    """
    is_batch = find_preset(experiment.preset).mode == "batch"
    shape = _replica_shape(experiment, arrivals)
    if is_batch:
        recorder, failed, num_padding_tokens = _run_batches(experiment, arrivals, progress)
    else:
        recorder, failed = _run_continuous(experiment, shape, arrivals, progress, timeline)
        num_padding_tokens = 0
    if num_lost := len(arrivals) - len(recorder.done) - len(failed):
        raise IntegrityError(f"preset {experiment.preset}: {num_lost} of {len(arrivals)} requests never ended")
    summary = summarize(
        recorder,
        shape,
        experiment.latency,
        experiment.sla,
        num_failed=len(failed),
        num_padding_tokens=num_padding_tokens,
    )
    return Outcome(recorder, tuple(failed), summary)


def _replica_shape(experiment: Experiment, arrivals: Workload) -> ReplicaShape:
    preset = find_preset(experiment.preset)
    return ReplicaShape(
        num_blocks=experiment.kv_tokens // experiment.block_size,
        block_size=experiment.block_size,
        num_host_blocks=experiment.host_kv_tokens // experiment.block_size,
        max_num_seqs=experiment.max_num_seqs,
        max_batch_tokens=experiment.max_batch_tokens,
        look_every=0 if is_steady(preset) else 1,
        shares_prefixes=any(arrival.prefix for arrival in arrivals),
    )


def _run_continuous(
    experiment: Experiment,
    shape: ReplicaShape,
    arrivals: Workload,
    progress: Callable[[int], None] | None,
    timeline: Timeline | None,
) -> tuple[Recorder, list[str]]:
    settings = PolicySettings(
        watermark=experiment.watermark,
        max_new_tokens=max((arrival.max_new_tokens for arrival in arrivals), default=1),
        cost=experiment.latency.cost,
        block_size=experiment.block_size,
    )
    limits = SchedulerLimits(experiment.max_num_seqs, standby_slots=0)
    first_seed = experiment.seed * experiment.num_replicas

    def make_scheduler(index: int) -> ReplicaScheduler:
        return build_scheduler(experiment.preset, limits, replace(settings, seed=first_seed + index))

    fleet = Fleet(
        FleetShape(shape, experiment.latency, experiment.num_replicas),
        build_router(experiment.preset, settings=settings),
        make_scheduler,
        clients=experiment.clients,
        timeline=timeline,
    )
    return fleet.run(arrivals, progress), fleet.refused


def _run_batches(
    experiment: Experiment, arrivals: Workload, progress: Callable[[int], None] | None
) -> tuple[Recorder, list[str], int]:
    """Static batches; what they compute beyond the outputs is the third of the results."""
    if experiment.clients is not None:
        raise InvalidValueError("clients", experiment.clients, f"none with {experiment.preset}, which forms batches")
    latency = experiment.latency
    foreseen = [arrival.max_new_tokens if arrival.forecast is None else arrival.forecast.mean for arrival in arrivals]
    settings = BatchSettings(
        memory_tokens=experiment.kv_tokens,
        serving_time_s=partial(_static_batch_s, latency),
        edges=sample_edges(foreseen, NUM_BINS) if foreseen else (0.0, math.inf),
    )
    num_ended = 0

    def note(prompt_lens: list[int], output_lens: list[int], seconds: float) -> None:
        nonlocal num_ended
        num_ended += len(prompt_lens)
        if progress is not None:
            progress(num_ended)

    fleet = BatchFleet(
        build_batcher(experiment.preset, settings),
        StaticExecution(latency, experiment.kv_tokens),
        experiment.num_replicas,
        reload_s=RELOAD_S,
        on_run=note,
    )
    recorder = fleet.run(arrivals)
    num_outputs = sum(record.num_tokens for record in recorder.done)
    return recorder, fleet.failed, fleet.counts.num_tokens - num_outputs


def _static_batch_s(latency: LatencyModel, num_jobs: int, prompt_len: int, output_len: int) -> float:
    """What an exact estimate says of a padded batch."""
    return StaticExecution(latency).run([prompt_len] * num_jobs, [output_len] * num_jobs).seconds
