"""The clusters and workloads of Preble's evaluation, and one run of a system on one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from farsight.core.config.scheduling import PlacementConfig
from farsight.core.costs import StepCost
from farsight.core.errors import InvalidValueError
from farsight.core.request import Request
from farsight.policies.compose import build_scheduler
from farsight.policies.fleet.scheduler import GlobalScheduler
from farsight.policies.placement.base import Choice, Placement, ReplicaLoad, RoundRobin
from farsight.policies.placement.e2 import E2Router
from farsight.policies.placement.load_cost import from_step_cost
from farsight.policies.replica.scheduler import ReplicaScheduler, SchedulerLimits
from farsight.policies.settings import PolicySettings
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import LatencyModel, LinearLatency
from farsight.simulator.cluster.records import Record
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.traffic.arrivals import Poisson
from farsight.simulator.traffic.prefixes import (
    AGENT,
    LONG_DOCUMENT,
    PROGRAMMING,
    TOOL_USE,
    VIDEO_QA,
    PrefixLaw,
    prefix_workload,
)
from farsight.simulator.traffic.workload import SimRequest
from lab.reproduce.rows import UNBOUND, Draws

BLOCK = 64
SEATS = 256

MISTRAL_7B_A6000 = LinearLatency(
    StepCost(base_s=24.8e-3, prefill_token_s=0.1205e-3, decode_seq_s=0.02e-3, context_token_s=0.2e-6)
)
"""The authors' constants (WukLab/preble), made linear: 24.8 ms is their smallest step, 0.1084 / 0.9 ms a prompt token,
1.86e-4 / 0.9 us a token of context."""

LLAMA_3_70B_H100 = LinearLatency(
    StepCost(base_s=9.4e-3, prefill_token_s=0.04e-3, decode_seq_s=0.02e-3, context_token_s=0.04e-6)
)
"""The authors' constants for two H100 of a tensor-parallel group, halved for four; the time for context is assumed:
160 KiB of KV a token over four memories of 3.35 TB/s at a third of their peak."""

A6000_TOKENS = 198_516
"""KV tokens of one replica in the authors' implementation."""
H100_TOKENS = 700_000
"""Four devices of 80 GB less 140 GB of weights and a tenth for activations, over 320 KiB of KV a token; rounded."""


@dataclass(frozen=True, slots=True)
class PrebleCluster:
    """Equal replicas of one model.

    Attributes:
        capacity: KV tokens of a replica.
        seats: Most requests of a batch.
    """

    name: str
    num_replicas: int
    latency: LatencyModel
    capacity: int
    seats: int = SEATS

    @property
    def shape(self) -> FleetShape:
        replica = ReplicaShape(self.capacity // BLOCK, BLOCK, max_num_seqs=self.seats, shares_prefixes=True)
        return FleetShape(replica, self.latency, self.num_replicas)


TWO_A6000 = PrebleCluster("mistral-7b, 2 a6000", 2, MISTRAL_7B_A6000, A6000_TOKENS)
FOUR_A6000 = PrebleCluster("mistral-7b, 4 a6000", 4, MISTRAL_7B_A6000, A6000_TOKENS)
EIGHT_H100 = PrebleCluster("llama-3-70b, 8 h100 (TP 4, DP 2)", 2, LLAMA_3_70B_H100, H100_TOKENS)


@dataclass(frozen=True, slots=True)
class Study:
    """A workload of the paper, of the size that the authors' experiment files (WukLab/preble) give it on two GPUs.

    They raise the requests with the rate, for runs of about five minutes, and both with the number of GPUs; the one in
    the middle is taken, and all prefixes are equally likely.

    Attributes:
        prefixes: Distinct ones for each replica.
        requests: For each replica.
    """

    law: PrefixLaw
    prefixes: int
    requests: int

    def draw(self, rng: np.random.Generator, instants: Sequence[float], num_prefixes: int) -> list[SimRequest]:
        return prefix_workload(rng, instants, self.law, num_prefixes, BLOCK, popularity=EVEN)


EVEN = 1e-9
"""Exponent of a Zipf law that is even: only the ablation of the paper has skewed prefixes."""

STUDIES = {
    study.law.app: study
    for study in (
        Study(TOOL_USE, prefixes=100, requests=1350),
        Study(AGENT, prefixes=100, requests=1250),
        Study(PROGRAMMING, prefixes=80, requests=940),
        Study(VIDEO_QA, prefixes=75, requests=450),
        Study(LONG_DOCUMENT, prefixes=15, requests=196),
    )
}


@dataclass(frozen=True, slots=True)
class PrebleSystem:
    """What is compared: a placement and the order of the waiting queues.

    Attributes:
        e2: E2 with these switches; None for the other placements.
        partition: The oracle partition instead of round-robin, if not E2.
        order: The order of the waiting queues.
        chunk: Prompt tokens of one step.
    """

    name: str
    e2: PlacementConfig | None = None
    partition: bool = False
    order: str = "fcfs"
    chunk: int = 2048


ROUND_ROBIN = PrebleSystem("round-robin")
ORACLE = PrebleSystem("oracle partition", partition=True)
E2_ALONE = PrebleSystem("E2", PlacementConfig(balance=False, rebalance=False, autoscale=False))
E2_REBALANCED = PrebleSystem("+ rebalance, autoscale", PlacementConfig(balance=False))
E2_WHOLE = PrebleSystem("+ prefill/decode balance", PlacementConfig())
PREBLE = PrebleSystem("+ priority groups", PlacementConfig(), order="hit-groups")


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds over all requests of a run, and the part of the prompt tokens that was cached."""

    mean_s: float
    p99_s: float
    ttft_s: float
    tpot_s: float
    hit_ratio: float
    ends_at: float

    def seconds(self, metric: str) -> float:
        """``mean`` or ``p99``."""
        return self.mean_s if metric == "mean" else self.p99_s


def ratios(some: Sequence[Latencies], others: Sequence[Latencies], metric: str) -> Draws:
    """The ratio of both in each drawn workload."""
    values = (one.seconds(metric) / other.seconds(metric) for one, other in zip(some, others, strict=True))
    return Draws(len(some), tuple(values))


def simulate(cluster: PrebleCluster, system: PrebleSystem, arrivals: Sequence[SimRequest]) -> Latencies:
    """A run to its last token."""
    router = GlobalScheduler(_placement(cluster, system, arrivals))
    shape = replace(cluster.shape, replica=replace(cluster.shape.replica, max_batch_tokens=system.chunk))
    fleet = Fleet(shape, router, lambda _: _scheduler(cluster, system))
    return _latencies(fleet.run(arrivals).done)


def _scheduler(cluster: PrebleCluster, system: PrebleSystem) -> ReplicaScheduler:
    limits = SchedulerLimits(cluster.seats, standby_slots=0)
    return build_scheduler("fcfs", limits, PolicySettings(UNBOUND), order=system.order)


def saturation(cluster: PrebleCluster, arrivals: Sequence[SimRequest]) -> float:
    """Requests a second that round-robin completes if all are there at the start."""
    at_once = [replace(each, arrived_at=0.0) for each in arrivals]
    return len(arrivals) / simulate(cluster, ROUND_ROBIN, at_once).ends_at


def instants(rng: np.random.Generator, num_requests: int, rate: float) -> list[float]:
    return [float(at) for at in Poisson(rate).sample(rng, num_requests)]


def slowed(arrivals: Sequence[SimRequest], factor: float) -> list[SimRequest]:
    """The same requests with all gaps so many times as long."""
    return [replace(each, arrived_at=each.arrived_at * factor) for each in arrivals]


def _placement(cluster: PrebleCluster, system: PrebleSystem, arrivals: Sequence[SimRequest]) -> Placement:
    if system.e2 is not None:
        return E2Router(from_step_cost(cluster.latency.cost), BLOCK, system.e2)
    if not system.partition:
        return RoundRobin()
    return OraclePartition(partitioned_heads(arrivals), cluster.num_replicas, BLOCK, _common_blocks(arrivals))


def partitioned_heads(arrivals: Sequence[SimRequest]) -> dict[int, float]:
    """What the oracle partition divides: the first block of each prefix behind those that all share, each once.

    "Evenly" means as many prefixes everywhere: how popular each will be is not what a partition knows.
    """
    leading = _common_blocks(arrivals)
    return dict.fromkeys((each.prefix[leading] for each in arrivals if len(each.prefix) > leading), 1.0)


def _common_blocks(arrivals: Sequence[SimRequest]) -> int:
    """Blocks with which every prompt begins: those of a system prompt, which tells no prefixes apart."""
    first, *others = (each.prefix for each in arrivals)
    for place, name in enumerate(first):
        if any(len(other) <= place or other[place] != name for other in others):
            return place
    return len(first)


def _latencies(done: Sequence[Record]) -> Latencies:
    jcts = [record.jct_s for record in done]
    tpots = [record.tpot_s for record in done if not math.isnan(record.tpot_s)]
    return Latencies(
        mean_s=float(np.mean(jcts)),
        p99_s=float(np.quantile(jcts, 0.99)),
        ttft_s=float(np.mean([record.ttft_s for record in done])),
        tpot_s=float(np.mean(tpots)),
        hit_ratio=sum(record.cached_len for record in done) / sum(record.arrival.prompt_len for record in done),
        ends_at=max(record.finished_at for record in done),
    )


class OraclePartition(Placement):
    """The oracle baseline of Preble (section 5.1), a partition of the prefixes that is fixed in advance.

    Each prefix belongs to one replica, and the known loads of the prefixes are shared out evenly.

    The heaviest prefix goes to the lightest replica first. Unknown prefixes go to the lightest one. O(1) a placement.

    Args:
        loads: The future load of each prefix, in any unit, by the path element that tells the prefixes apart.
        num_replicas: Number of owners; owner i is the i-th (modulo their number) of the replicas that take requests.
        block_size: Tokens of a path element.
        num_leading: Path elements before that element, which all prefixes share.
    """

    def __init__(self, loads: Mapping[int, float], num_replicas: int, block_size: int, num_leading: int = 0) -> None:
        if num_replicas < 1:
            raise InvalidValueError("num_replicas", num_replicas, "an integer >= 1")
        if block_size < 1:
            raise InvalidValueError("block_size", block_size, "an integer >= 1")
        self.block_size = block_size
        self._num_leading = num_leading
        self._owners: dict[int, int] = {}
        totals = [0.0] * num_replicas
        for first, load in sorted(loads.items(), key=lambda item: (-item[1], item[0])):
            owner = totals.index(min(totals))
            self._owners[first] = owner
            totals[owner] += load
        self._lightest = totals.index(min(totals))

    def choose(self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float) -> Choice:
        """Chooses the owner of the request's prefix among ``loads``."""
        head = prefix[self._num_leading] if len(prefix) > self._num_leading else None
        known = head in self._owners
        owner = self._lightest if head is None else self._owners.get(head, self._lightest)
        return Choice(loads[owner % len(loads)].name, "owner of the prefix" if known else "unknown prefix")
