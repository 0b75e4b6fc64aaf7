"""One simulated run, from its settings to its summary."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from farsight.core.config.scheduling import BatchConfig, PlacementConfig, SchedulerConfig
from farsight.core.errors import InvalidValueError
from farsight.kvcache.checkpoints import state_spacing
from farsight.policies.compose import check_scheduler
from farsight.simulator import predictors
from farsight.simulator.cluster.fleet import Scaling
from farsight.simulator.cluster.latency import A100_7B, LinearLatency, Roofline
from farsight.simulator.predictors import PredictLengths
from farsight.simulator.summary import Sla
from farsight.simulator.traffic.arrivals import debatch, rescale
from farsight.simulator.traffic.prefixes import mooncake_blocks
from farsight.simulator.traffic.traces import find_data, read_rows, read_trace
from farsight.simulator.traffic.workload import SimRequest, Workload
from farsight.simulator.traffic.workloads import BLOCK_SIZE, WORKLOADS, build_workload, retime

DEFAULT_REQUESTS = 1000
DEFAULT_RATE = 8.0
"""Requests per second and replica of drawn workloads."""
TRACES = {
    "azure-conv": "azure2023_conv.csv.gz",
    "azure-code": "azure2023_code.csv.gz",
    "mooncake": "mooncake_conversation.jsonl.gz",
    "mooncake-synthetic": "mooncake_synthetic.jsonl.gz",
}
"""Workloads with their own arrival times, and their files."""
NOISE_SIGMA = 0.5
"""Sigma of the noisy predictor."""
MEMORY_SHARE = 0.9
"""Share of a GPU's memory for weights and KV; the rest is for activations."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """All settings that determine the result of a run.

    Attributes:
        workload: Name of a workload, or path of a trace.
        num_requests: Most requests; None for all of the workload.
        rate: Requests per second in the open loop, infinity for all at once; None for that of the trace, or for
            ``DEFAULT_RATE`` a replica.
        clients: Closed loop: number of requests in flight at any time.
        predictor: Name of the output-length predictor.
        latency: Step times of a replica.
        kv_tokens: Capacity of a replica's KV pool.
        host_kv_tokens: Host capacity per replica, for presets that move KV there.
        block_size: Tokens of a KV block.
        max_num_seqs: Most sequences in one step.
        max_batch_tokens: Most tokens computed in one step; longer prompts take several steps.
        scheduler: Preset, parts and their numbers: ``[scheduler]`` of a server.
        placement: Numbers of placement by prefixes: ``[placement]`` of a server.
        offload_hop_s: Seconds from a Scheduler's question about KV to the KV offload manager's answer, as between
            processes; None decides in no time.
        batch: How presets of batch mode form batches: ``[batch]`` of a server.
        scaling: Bounds of the number of replicas, open loop only; None keeps ``num_replicas``.
        seed: Random seed of all draws.
    """

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
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    offload_hop_s: float | None = None
    batch: BatchConfig = field(default_factory=BatchConfig)
    sla: Sla = field(default_factory=Sla)
    scaling: Scaling | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_scheduler(self.scheduler)
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
        if self.offload_hop_s is not None and not 0 <= self.offload_hop_s < math.inf:
            raise InvalidValueError("offload_hop_s", self.offload_hop_s, "seconds >= 0")
        if self.scaling is not None and self.clients is not None:
            raise InvalidValueError("clients", self.clients, "none beside max_replicas")
        if self.seed < 0:
            raise InvalidValueError("seed", self.seed, "an integer >= 0")

    @property
    def preset(self) -> str:
        return self.scheduler.preset

    def under(self, preset: str) -> Experiment:
        """Returns the experiment with another preset and the same numbers."""
        return replace(self, scheduler=replace(self.scheduler, preset=preset))


def make_arrivals(experiment: Experiment) -> Workload:
    """The requests of a run, with their forecasts.

    The seed determines drawn workloads. If a trace has more requests than wanted, each seed takes another window, as
    far as there are several.

    Raises:
        InvalidValueError: There is no such workload, file or predictor, or fewer requests than are wanted.
        TraceError, MissingTraceError: Its file cannot be used, or is missing.
    """
    if experiment.predictor not in PREDICTORS:
        raise InvalidValueError("predictor", experiment.predictor, f"one of {', '.join(PREDICTORS)}")
    predict = PREDICTORS[experiment.predictor](experiment)
    return predict(_requests(experiment))


def _requests(experiment: Experiment) -> list[SimRequest]:
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
        raise InvalidValueError("workload", name, f"an existing file, or one of {', '.join(WORKLOADS)}{hint}")
    return _window(Path(name), experiment.num_requests, experiment)


def _window(path: Path, num_requests: int | None, experiment: Experiment) -> list[SimRequest]:
    """Consecutive requests of a trace, moved to instant 0."""
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


PREDICTORS: dict[str, Callable[[Experiment], PredictLengths]] = {
    "none": lambda experiment: predictors.none,
    "history": lambda experiment: predictors.history,
    "shuffled": lambda experiment: predictors.Shuffled(seed=experiment.seed),
    "noisy": lambda experiment: predictors.Noisy(NOISE_SIGMA, seed=experiment.seed),
    "oracle": lambda experiment: predictors.oracle,
}


NUM_STATES = 512
"""Sequences of a replica that may have a state beside their keys and values at once, as a server has for 256 a step."""

KEPT_STATES = 128
"""States of prefixes that a replica keeps beside these."""


def num_states(experiment: Experiment) -> int:
    """Sequences that may have a state at once; 0 for a model of attention alone."""
    latency = experiment.latency
    return NUM_STATES if isinstance(latency, Roofline) and latency.model.state_bytes else 0


def spacing_of_states(experiment: Experiment) -> int:
    """Tokens between two kept states of a prompt; 0 for a model of attention alone."""
    latency = experiment.latency
    if not isinstance(latency, Roofline) or not latency.model.state_bytes:
        return 0
    return state_spacing(latency.model.state_bytes, latency.model.kv_bytes, experiment.block_size)


def free_kv_tokens(latency: Roofline) -> int:
    """KV tokens that fit into a replica's GPUs beside the weights, and the states of a model that has some.

    Raises:
        InvalidValueError: The weights do not fit.
    """
    gpu, model, num_gpus = latency.gpu, latency.model, latency.tensor_parallel * latency.pipeline_parallel
    weights = 2 * model.num_params
    free = MEMORY_SHARE * gpu.memory_bytes * num_gpus - weights - (NUM_STATES + KEPT_STATES) * model.state_bytes
    if free < model.kv_bytes:
        room = f"{MEMORY_SHARE * gpu.memory_bytes * num_gpus / 1e9:.0f} GB"
        expected = f"weights below the {room} that {num_gpus} x {gpu.name} have for them, not {weights / 1e9:.0f} GB"
        raise InvalidValueError("model", model.name, expected)
    return int(free / model.kv_bytes)
