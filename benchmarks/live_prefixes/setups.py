"""Workloads whose prompts have equal beginnings, and the placements that are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from benchmarks.live_presets.live import Hardware
from benchmarks.live_presets.study import System
from farsight.core.config.scheduling import PlacementConfig
from farsight.estimator.profile_file import DeviceProfile
from farsight.policies.compose import build_router, build_scheduler
from farsight.policies.fleet.scheduler import GlobalScheduler
from farsight.policies.presets import find_preset
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.policies.settings import PolicySettings
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import LinearLatency
from farsight.simulator.cluster.records import Record
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.predictors import Noisy
from farsight.simulator.summary import Sla
from farsight.simulator.traffic.arrivals import Poisson, debatch, rescale
from farsight.simulator.traffic.prefixes import PROGRAMMING, PrefixLaw, prefix_workload, real_prefixes
from farsight.simulator.traffic.traces import find_data, read_trace
from farsight.simulator.traffic.workload import SimRequest
from farsight.simulator.traffic.workloads import retime
from lab.reproduce.placements import REASONING
from lab.reproduce.preble.runs import A6000_TOKENS, MISTRAL_7B_A6000, OraclePartition

BLOCK = 64
SEATS = 128
CHUNK = 2048
SHRINK = 8
"""Lengths of Mooncake's requests are divided by this: their blocks of 512 tokens become blocks of 64."""
SIGMA = 0.5
"""Sigma of the forecasts' log-normal noise."""

A6000 = DeviceProfile(
    MISTRAL_7B_A6000.cost, kv_bytes=MISTRAL_7B_A6000.kv_bytes, copy_bandwidth=MISTRAL_7B_A6000.copy_bandwidth
)
"""Mistral-7B as in Preble's evaluation."""

Draw = Callable[[np.random.Generator, int], list[SimRequest]]
"""(rng, number of requests) -> requests, at instants whose gaps are right but for their scale."""


@dataclass(frozen=True, slots=True)
class PrefixSetup:
    """A workload at a rate.

    Attributes:
        rate: Requests a second, of all replicas.
        warmup: Part of the requests that come first, to caches that are empty, and do not count.
        num_leading: Blocks at their beginning that all prompts share.
    """

    draw: Draw
    num_replicas: int
    rate: float
    num_requests: int
    kv_tokens: int = A6000_TOKENS
    warmup: float = 0.25
    num_leading: int = 0
    sla: Sla = field(default_factory=Sla)

    @property
    def num_warmup(self) -> int:
        return int(self.warmup * self.num_requests)

    @property
    def hardware(self) -> Hardware:
        return Hardware(A6000, self.kv_tokens, self.kv_tokens, SEATS, CHUNK + SEATS, BLOCK, self.num_replicas)

    def sized(self, num_requests: int) -> PrefixSetup:
        return replace(self, num_requests=num_requests)

    def arrivals(self, seed: int) -> list[SimRequest]:
        requests = self.draw(np.random.default_rng(seed), self.num_requests)
        at = rescale(np.array([each.arrived_at for each in requests]), self.rate)
        return Noisy(SIGMA, seed)(retime(requests, at))


def zipf_prefixes(kind: str, rng: np.random.Generator, num_requests: int) -> list[SimRequest]:
    """Requests of the file of real prefixes, by Zipf's law of 1.1 over the prefixes; Poisson arrivals."""
    path = find_data("prefix_groups.jsonl.gz")
    return real_prefixes(rng, Poisson(1.0).sample(rng, num_requests).tolist(), path, kind, BLOCK)


def law_prefixes(law: PrefixLaw, num_prefixes: int, rng: np.random.Generator, num_requests: int) -> list[SimRequest]:
    """Requests by one of the laws of Preble's workloads; Poisson arrivals."""
    return prefix_workload(rng, Poisson(1.0).sample(rng, num_requests).tolist(), law, num_prefixes, BLOCK)


def mooncake(rng: np.random.Generator, num_requests: int) -> list[SimRequest]:
    """Whole conversations of Mooncake's trace, drawn at random until there are so many requests, in their order; the
    batches of its instants are spread."""
    conversations = _conversations()
    chosen: list[SimRequest] = []
    for index in rng.permutation(len(conversations)):
        chosen += conversations[int(index)]
        if len(chosen) >= num_requests:
            break
    chosen.sort(key=lambda each: each.arrived_at)
    return chosen[:num_requests]


@lru_cache(maxsize=1)
def _conversations() -> list[list[SimRequest]]:
    """By the block that follows the system prompt of all."""
    trace = read_trace(find_data("mooncake_conversation.jsonl.gz"))
    instants = debatch(np.array([each.arrived_at for each in trace]))
    found: dict[tuple[int, ...], list[SimRequest]] = {}
    for each in retime(trace, instants):
        found.setdefault(each.prefix[:2], []).append(_shrunk(each))
    return list(found.values())


def _shrunk(arrival: SimRequest) -> SimRequest:
    prompt_len, output_len = (max(1, num // SHRINK) for num in (arrival.prompt_len, arrival.output_len))
    most = max(1, arrival.max_new_tokens // SHRINK)
    full = arrival.prefix[: prompt_len // BLOCK]
    return replace(arrival, prompt_len=prompt_len, output_len=output_len, max_new_tokens=most, prefix=full)


_TOOLS, _MOONCAKE = partial(zipf_prefixes, "toolbench"), mooncake

SHARED: dict[str, PrefixSetup] = {
    "tools, 4": PrefixSetup(_TOOLS, 4, rate=40.0, num_requests=1200),
    "tools, 8": PrefixSetup(_TOOLS, 8, rate=80.0, num_requests=2000),
    "mooncake, 4": PrefixSetup(_MOONCAKE, 4, rate=20.0, num_requests=1200, num_leading=1),
    "mooncake, 8": PrefixSetup(_MOONCAKE, 8, rate=40.0, num_requests=1200, num_leading=1),
}
"""Where placement by prefix is judged beside round-robin."""

LONG: dict[str, PrefixSetup] = {
    "programs, 4": PrefixSetup(partial(law_prefixes, PROGRAMMING, 320), 4, rate=12.0, num_requests=800),
    "reasoning, 4": PrefixSetup(partial(law_prefixes, REASONING, 400), 4, rate=6.0, num_requests=500),
}
"""Long outputs, at nine tenths of what round-robin sustains."""

SETUPS = SHARED | LONG


def simulated(
    preset: str, scheduler: dict[str, str], e2: PlacementConfig, setup: PrefixSetup, arrivals: list[SimRequest]
) -> list[Record]:
    """The same in the simulator."""
    settings = PolicySettings(cost=A6000.cost, block_size=BLOCK, placement=e2)
    router = build_router(preset, scheduler.get("placement", ""), settings)
    return _run(setup, router, preset, scheduler.get("order", ""), arrivals)


def oracle(setup: PrefixSetup, arrivals: list[SimRequest]) -> list[Record]:
    """Round-robin's replicas behind a partition of the prefixes that is fixed in advance, as many of them on each."""
    heads = dict.fromkeys(
        (each.prefix[setup.num_leading] for each in arrivals if len(each.prefix) > setup.num_leading), 1.0
    )
    partition = OraclePartition(heads, setup.num_replicas, BLOCK, setup.num_leading)
    return _run(setup, GlobalScheduler(partition), "fcfs", "", arrivals)


def _run(
    setup: PrefixSetup, router: GlobalScheduler, preset: str, order: str, arrivals: Sequence[SimRequest]
) -> list[Record]:
    swaps = find_preset(preset).kv == "cheapest-victim"
    shape = ReplicaShape(
        num_blocks=setup.kv_tokens // BLOCK,
        block_size=BLOCK,
        num_host_blocks=setup.kv_tokens // BLOCK if swaps else 0,
        max_num_seqs=SEATS,
        max_batch_tokens=CHUNK + SEATS,
        look_every=4 if find_preset(preset).order == "gittins" else 0,
        shares_prefixes=True,
    )
    latency = LinearLatency(A6000.cost, A6000.kv_bytes, A6000.copy_bandwidth)
    settings = PolicySettings(cost=A6000.cost)
    limits = SchedulerLimits(SEATS, standby_slots=0)
    fleet = Fleet(
        FleetShape(shape, latency, setup.num_replicas),
        router,
        lambda index: build_scheduler(preset, limits, settings, order=order),
    )
    return fleet.run(arrivals).done


def _system(preset: str, switches: dict[str, bool] | None = None, **scheduler: str) -> System:
    e2 = PlacementConfig(**(switches or {}))
    settings: dict[str, dict[str, Any]] = {"scheduler": {"preset": preset, **scheduler}, "placement": switches or {}}
    return System(settings, partial(simulated, preset, scheduler, e2))


_BARE = {"balance": False, "rebalance": False, "autoscale": False}

SYSTEMS: dict[str, System] = {
    "round-robin": _system("fcfs"),
    "oracle partition": System(None, oracle),
    "E2": _system("fcfs", _BARE, placement="e2"),
    "+ rebalance, autoscale": _system("fcfs", {"balance": False}, placement="e2"),
    "+ prefill/decode balance": _system("fcfs", placement="e2"),
    "preble": _system("preble"),
    "farsight-mean": _system("farsight-mean"),
}
"""``preble`` is the line before it with hit groups: each adds a part to the one before, from E2 on."""
