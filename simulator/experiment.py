"""One run from what it is to what it comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from core.errors import IntegrityError, InvalidValueError
from core.forecast import QUANTILES, Forecast
from policies.presets import build_router, build_scheduler, find_preset
from policies.replica_scheduler import SchedulerLimits
from simulator.fleet import Fleet, FleetShape
from simulator.latency import A100_7B, LinearLatency, Roofline
from simulator.records import Recorder
from simulator.replica import ReplicaShape
from simulator.summary import Sla, Summary, summarize
from simulator.timeline import Timeline
from simulator.workload import Arrival, Workload

DEFAULT_REQUESTS = 1000
DEFAULT_RATE = 5.0
"""Requests per second and replica."""
MEMORY_SHARE = 0.9
"""Of a GPU's memory, for weights and KV; the rest is for activations."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Everything that the result of a run follows from.

    Attributes:
        workload: Name of a workload, or path of a trace.
        num_requests: At most; None for all that the workload has.
        rate: Requests per second in the open loop; None for the workload's own.
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
    workload: str = "uniform"
    num_requests: int | None = None
    rate: float | None = None
    clients: int | None = None
    num_replicas: int = 1
    predictor: str = "none"
    latency: LinearLatency | Roofline = A100_7B
    kv_tokens: int = 120_000
    host_kv_tokens: int = 262_144
    block_size: int = 16
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
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise InvalidValueError("rate", self.rate, "requests per second above 0")
        if self.rate is not None and self.clients is not None:
            raise InvalidValueError("rate", self.rate, "none beside clients: a load is open or closed")
        if self.seed < 0:
            raise InvalidValueError("seed", self.seed, "an integer >= 0")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run leaves.

    Attributes:
        refused: Ids of requests that no replica could ever hold.
    """

    recorder: Recorder
    refused: tuple[str, ...]
    summary: Summary


def make_arrivals(experiment: Experiment) -> Workload:
    """The requests of a run, with their forecasts.

    Raises:
        InvalidValueError: There is no such workload or predictor.
    """
    if experiment.workload not in WORKLOADS:
        raise InvalidValueError("workload", experiment.workload, f"one of {', '.join(WORKLOADS)}")
    if experiment.predictor not in PREDICTORS:
        raise InvalidValueError("predictor", experiment.predictor, f"one of {', '.join(PREDICTORS)}")
    arrivals = WORKLOADS[experiment.workload](experiment)
    return [PREDICTORS[experiment.predictor](arrival) for arrival in arrivals]


def _uniform(experiment: Experiment) -> Workload:
    """Prompts of 32 to 1024 and outputs of 8 to 512 tokens, Poisson arrivals."""
    rng = np.random.default_rng(experiment.seed)
    size = DEFAULT_REQUESTS if experiment.num_requests is None else experiment.num_requests
    rate = experiment.num_replicas * DEFAULT_RATE if experiment.rate is None else experiment.rate
    arrived_at = np.cumsum(rng.exponential(1 / rate, size)).tolist()
    prompt_lens, output_lens = rng.integers(32, 1025, size).tolist(), rng.integers(8, 513, size).tolist()
    return [
        Arrival(f"r{i}", at, prompt_len, output_len, max_new_tokens=1024)
        for i, (at, prompt_len, output_len) in enumerate(zip(arrived_at, prompt_lens, output_lens, strict=True))
    ]


def _oracle(arrival: Arrival) -> Arrival:
    quantiles = (float(arrival.output_len),) * len(QUANTILES)
    return replace(arrival, forecast=Forecast(quantiles[0], quantiles, num_samples=1, source="oracle", version=0))


WORKLOADS: dict[str, Callable[[Experiment], Workload]] = {"uniform": _uniform}
PREDICTORS: dict[str, Callable[[Arrival], Arrival]] = {"none": lambda arrival: arrival, "oracle": _oracle}


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
        progress: Told how many requests have ended, after each.
        timeline: Samples the replicas as time goes on.

    Raises:
        IntegrityError: The preset left requests waiting for ever.
    """
    shape = ReplicaShape(
        num_blocks=experiment.kv_tokens // experiment.block_size,
        block_size=experiment.block_size,
        num_host_blocks=experiment.host_kv_tokens // experiment.block_size,
        max_num_seqs=experiment.max_num_seqs,
        max_batch_tokens=experiment.max_batch_tokens,
        look_every=_look_every(experiment.preset),
        shares_prefixes=any(arrival.prefix for arrival in arrivals),
    )
    limits = SchedulerLimits(experiment.max_num_seqs, standby_slots=0)
    fleet = Fleet(
        FleetShape(shape, experiment.latency, experiment.num_replicas),
        build_router(experiment.preset),
        lambda _: build_scheduler(experiment.preset, watermark=experiment.watermark, limits=limits),
        clients=experiment.clients,
        timeline=timeline,
    )
    recorder = fleet.run(arrivals, progress)
    if num_lost := len(arrivals) - len(recorder.done) - len(fleet.refused):
        raise IntegrityError(f"preset {experiment.preset}: {num_lost} of {len(arrivals)} requests never ended")
    summary = summarize(recorder, shape, experiment.latency, experiment.sla, num_failed=len(fleet.refused))
    return Outcome(recorder, tuple(fleet.refused), summary)


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


def _look_every(preset: str) -> int:
    """Watermark admission over FCFS changes its mind only when something ends; others may with every step."""
    parts = find_preset(preset)
    return 0 if (parts.order, parts.admission) == ("fcfs", "watermark") else 1
