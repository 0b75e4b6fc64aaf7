"""One run from what it is to what it comes to."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from core.errors import IntegrityError, InvalidValueError
from policies.builders import BatchSettings, PolicySettings, build_batcher, build_router, build_scheduler
from policies.multi_bin import sample_edges
from policies.presets import find_preset
from policies.replica_scheduler import ReplicaScheduler, SchedulerLimits
from simulator import predictors
from simulator.arrivals import debatch, rescale
from simulator.batch_fleet import BatchFleet, StaticExecution
from simulator.fleet import Fleet, FleetShape
from simulator.latency import A100_7B, LatencyModel, LinearLatency, Roofline
from simulator.predictors import Foresee
from simulator.prefixes import mooncake_blocks
from simulator.records import Recorder
from simulator.replica import ReplicaShape
from simulator.summary import Sla, Summary, summarize
from simulator.timeline import Timeline
from simulator.traces import find_data, read_rows, read_trace
from simulator.workload import Arrival, Workload
from simulator.workloads import BLOCK_SIZE, WORKLOADS, build_workload, retime

DEFAULT_REQUESTS = 1000
DEFAULT_RATE = 8.0
"""Requests per second and replica, of workloads that are drawn."""
TRACES = {
    "azure-conv": "azure2023_conv.csv.gz",
    "azure-code": "azure2023_code.csv.gz",
    "mooncake": "mooncake_conversation.jsonl.gz",
    "mooncake-synthetic": "mooncake_synthetic.jsonl.gz",
}
"""Workloads with a pace of their own, and their files."""
NOISE_SIGMA = 0.5
"""Of the noisy predictor."""
NUM_BINS = 8
"""Of Multi-Bin: of equal mass by the lengths that are foreseen."""
RELOAD_S = 10.0
"""After a static batch ran out of memory: weights of 13 GB at 1.3 GB/s."""
MEMORY_SHARE = 0.9
"""Of a GPU's memory, for weights and KV; the rest is for activations."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Everything that the result of a run follows from.

    Attributes:
        workload: Name of a workload, or path of a trace.
        num_requests: At most; None for all that the workload has.
        rate: Requests per second in the open loop, infinity for all at once; None for that of the trace, or for
            ``DEFAULT_RATE`` a replica.
        clients: Closed loop: so many requests under way at any time.
        predictor: Who foresees output lengths.
        latency: Step times of a replica.
        kv_tokens: That a replica's pool holds.
        host_kv_tokens: That the host holds for each replica, for presets that move KV there.
        block_size: Tokens of a KV block.
        max_num_seqs: Sequences in one step.
        max_batch_tokens: Tokens computed in one step; longer prompts are prefilled in several.
        watermark: Share of the KV pool that admission may fill, for presets that go by one.
        seed: Of all that is drawn.
    """

    preset: str = "fcfs"
    workload: str = "sharegpt-like"
    num_requests: int | None = None
    rate: float | None = None
    clients: int | None = None
    num_replicas: int = 1
    predictor: str = "none"
    latency: LinearLatency | Roofline = A100_7B
    kv_tokens: int = 120_000
    host_kv_tokens: int = 262_144
    block_size: int = BLOCK_SIZE
    max_num_seqs: int = 256
    max_batch_tokens: int = 2048
    watermark: float = 0.95
    sla: Sla = field(default_factory=Sla)
    seed: int = 0

    def __post_init__(self) -> None:
        find_preset(self.preset)
        for name in ("num_replicas", "block_size", "max_num_seqs", "max_batch_tokens"):
            if getattr(self, name) < 1:
                raise InvalidValueError(name, getattr(self, name), "an integer >= 1")
        if self.kv_tokens < self.block_size:
            raise InvalidValueError("kv_tokens", self.kv_tokens, f"an integer >= {self.block_size}, a KV block")
        for name in ("num_requests", "clients"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidValueError(name, value, "an integer >= 1")
        if self.rate is not None and not self.rate > 0:
            raise InvalidValueError("rate", self.rate, "requests per second above 0")
        if self.rate is not None and self.clients is not None:
            raise InvalidValueError("rate", self.rate, "none beside clients: a load is open or closed")
        if self.seed < 0:
            raise InvalidValueError("seed", self.seed, "an integer >= 0")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run leaves.

    Attributes:
        failed: Ids of requests that no replica could ever hold.
    """

    recorder: Recorder
    failed: tuple[str, ...]
    summary: Summary


def make_arrivals(experiment: Experiment) -> Workload:
    """The requests of a run, with their forecasts.

    Drawn workloads are drawn by the seed. Of a trace with more requests than are wanted each seed takes another
    window, as far as there are others.

    Raises:
        InvalidValueError: There is no such workload, file or predictor, or fewer requests than are wanted.
        TraceError, MissingTraceError: Its file cannot be used, or is not there.
    """
    if experiment.predictor not in PREDICTORS:
        raise InvalidValueError("predictor", experiment.predictor, f"one of {', '.join(PREDICTORS)}")
    foresee = PREDICTORS[experiment.predictor](experiment)
    return foresee(_requests(experiment))


def _requests(experiment: Experiment) -> list[Arrival]:
    name = experiment.workload
    num_requests = DEFAULT_REQUESTS if experiment.num_requests is None else experiment.num_requests
    if name in TRACES:
        return _window(find_data(TRACES[name]), num_requests, experiment)
    if name in WORKLOADS:
        rate = experiment.num_replicas * DEFAULT_RATE if experiment.rate is None else experiment.rate
        rng = np.random.default_rng(experiment.seed)
        return build_workload(name, rng, num_requests, None if rate == math.inf else rate)
    if not Path(name).is_file():
        nearest = difflib.get_close_matches(name, WORKLOADS, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise InvalidValueError("workload", name, f"a file that is there, or one of {', '.join(WORKLOADS)}{hint}")
    return _window(Path(name), experiment.num_requests, experiment)


def _window(path: Path, num_requests: int | None, experiment: Experiment) -> list[Arrival]:
    """So many requests of a trace that follow each other, from instant 0."""
    arrivals = read_trace(path)
    instants = np.array([arrival.arrived_at for arrival in arrivals])
    if "hash_ids" in next(read_rows(path)).values:
        arrivals, instants = mooncake_blocks(arrivals, experiment.block_size), debatch(instants)
    num = len(arrivals) if num_requests is None else num_requests
    if num > len(arrivals):
        raise InvalidValueError("num_requests", num, f"at most the {len(arrivals)} of {path.name}")
    first = experiment.seed % (len(arrivals) // num) * num
    arrivals, instants = arrivals[first : first + num], instants[first : first + num] - instants[first]
    if experiment.rate == math.inf:
        instants = np.zeros(num)
    elif experiment.rate is not None:
        instants = rescale(instants, experiment.rate)
    return retime(arrivals, instants)


PREDICTORS: dict[str, Callable[[Experiment], Foresee]] = {
    "none": lambda experiment: predictors.none,
    "history": lambda experiment: predictors.history,
    "shuffled": lambda experiment: predictors.Shuffled(seed=experiment.seed),
    "noisy": lambda experiment: predictors.Noisy(NOISE_SIGMA, seed=experiment.seed),
    "oracle": lambda experiment: predictors.oracle,
}


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
        # FCFS behind a watermark changes its mind only when something ends; others may with every step.
        look_every=0 if (preset.order, preset.admission) == ("fcfs", "watermark") else 1,
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


def free_kv_tokens(latency: Roofline) -> int:
    """KV tokens that a replica's GPUs hold beside the weights.

    Raises:
        InvalidValueError: The weights do not fit.
    """
    gpu, model, num_gpus = latency.gpu, latency.model, latency.tensor_parallel * latency.pipeline_parallel
    weights = 2 * model.num_params
    free = MEMORY_SHARE * gpu.memory_bytes * num_gpus - weights
    if free < model.kv_bytes:
        room = f"{MEMORY_SHARE * gpu.memory_bytes * num_gpus / 1e9:.0f} GB"
        expected = f"weights below the {room} that {num_gpus} x {gpu.name} have for them, not {weights / 1e9:.0f} GB"
        raise InvalidValueError("model", model.name, expected)
    return int(free / model.kv_bytes)
