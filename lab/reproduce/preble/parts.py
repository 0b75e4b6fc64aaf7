"""Preble's Figure 9, and its later parts on workloads on which they have something to do (section 5.4, Figure 10).

The paper adds the parts one after the other on tools by a fixed Zipf law of 1.1, where the later ones do not act here
(``figures.ablation``). Its text says what each is for:

- *Rebalancing and autoscaling* serve loads that are skewed and change. Here: tools by a Zipf law of 1.6, so that one
  tool asks for more than one replica's share, and another one every minute; and programs, which all share one system
  prompt.
- *Prefill/decode balance* sends a new prompt to a replica that mostly decodes, whose arithmetic is idle. A step must
  then cost the longer of arithmetic and memory traffic (``Roofline``): in the authors' linear constants a prompt token
  costs the same everywhere. Programs with long answers, cached, meet documents never asked about before.

Figure 9 runs vLLM as the engine. It cannot divide a prompt into chunks while it caches prefixes (section 5.3): whole
prompts are computed between the steps of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from farsight.simulator.cluster.latency import GPUS, MODELS, Roofline
from farsight.simulator.traffic.prefixes import LONG_DOCUMENT, PROGRAMMING, TOOL_USE, Level, PrefixLaw, prefix_workload
from farsight.simulator.traffic.workload import SimRequest
from lab.reproduce.preble.runs import (
    A6000_TOKENS,
    BLOCK,
    E2_ALONE,
    E2_REBALANCED,
    E2_WHOLE,
    EVEN,
    FOUR_A6000,
    ORACLE,
    PREBLE,
    ROUND_ROBIN,
    STUDIES,
    TWO_A6000,
    Latencies,
    PrebleCluster,
    PrebleSystem,
    instants,
    ratios,
    saturation,
    simulate,
    slowed,
)
from lab.reproduce.rows import Draws, OrderCheck, Reproduction, Row

SEEDS = (0, 1, 2)
NAME = "preble_parts"
ROOFLINE_A6000 = PrebleCluster(
    "mistral-7b, 4 a6000, roofline", 4, Roofline(GPUS["a6000"], MODELS["mistral-7b"]), A6000_TOKENS
)
NUM_TOOLS = 400
HOT, DRIFT_S = 1.6, 60.0
WHOLE_PROMPTS = 1 << 20
"""Tokens of a step that holds any prompts."""
SMALL_CHUNK = 256


def flat(law: PrefixLaw) -> PrefixLaw:
    """The same without a system prompt."""
    return replace(law, levels=(Level(1.0, None),))


def hot_tools(num_requests: int, seed: int) -> list[SimRequest]:
    """At load 1; which tool is the most popular changes every ``DRIFT_S`` seconds."""
    rng = np.random.default_rng(seed)
    at = instants(rng, num_requests, 1.0)
    still = prefix_workload(rng, at, flat(TOOL_USE), NUM_TOOLS, BLOCK, popularity=HOT)
    rate = saturation(FOUR_A6000, still)
    at = [each / rate for each in at]
    return prefix_workload(rng, at, flat(TOOL_USE), NUM_TOOLS, BLOCK, popularity=HOT, drift_s=DRIFT_S)


def programs(num_requests: int, seed: int) -> list[SimRequest]:
    """The paper's programs at load 1, all of them with one system prompt."""
    rng = np.random.default_rng(seed)
    study = STUDIES["program"]
    drawn = study.draw(rng, instants(rng, num_requests, 1.0), study.prefixes * FOUR_A6000.num_replicas)
    return slowed(drawn, 1 / saturation(FOUR_A6000, drawn))


def programs_and_documents(num_requests: int, seed: int) -> list[SimRequest]:
    """Eight programs to one document: two shared prompts with answers of 800 tokens, and prompts never seen before."""
    rng = np.random.default_rng(seed)
    num = num_requests * 8 // 9
    long = replace(flat(PROGRAMMING), output=800)
    cached = prefix_workload(rng, instants(rng, num, 2.0), long, 2, BLOCK, popularity=EVEN)
    others = num_requests - num
    new = prefix_workload(rng, instants(rng, others, 0.25), LONG_DOCUMENT, others, BLOCK, popularity=EVEN)
    first = 1 + max(name for each in cached for name in each.prefix)
    new = [replace(each, prefix=tuple(name + first for name in each.prefix)) for each in new]
    return sorted(cached + new, key=lambda each: each.arrived_at)


def _step(
    setting: str,
    cluster: PrebleCluster,
    before: PrebleSystem,
    after: PrebleSystem,
    workloads: Sequence[list[SimRequest]],
    note: str,
) -> list[Row]:
    """One part more, against the system without it: means over the workloads."""
    runs = [[simulate(cluster, system, each) for each in workloads] for system in (before, after)]
    rows = []
    for metric in ("mean", "p99"):
        without, with_it = (float(np.mean([run.seconds(metric) for run in each])) for each in runs)
        ratio = with_it / without
        told = f"order: below 1; {without:.3g} s without, {with_it:.3g} s with it; {note}"
        order = OrderCheck(ratio < 1, bound=1.0)
        drawn = ratios(runs[1], runs[0], metric)
        rows.append(Row(NAME, setting, f"{metric} / that without", order, ratio, told, drawn))
    return rows


def rebalancing(num_requests: int = 2500, seeds: Sequence[int] = SEEDS) -> list[Row]:
    workloads = [hot_tools(num_requests, seed) for seed in seeds]
    note = f"tools by Zipf's law of {HOT:g}, dealt out again every {DRIFT_S:g} s"
    return _step("rebalance, autoscale: hot tools", FOUR_A6000, E2_ALONE, E2_REBALANCED, workloads, note)


def rebalancing_programs(num_requests: int = 3760, seeds: Sequence[int] = SEEDS[:1]) -> list[Row]:
    workloads = [programs(num_requests, seed) for seed in seeds]
    note = "one system prompt for all, which one replica holds"
    return _step("rebalance, autoscale: programs", FOUR_A6000, E2_ALONE, E2_REBALANCED, workloads, note)


def balancing(chunk: int, num_requests: int = 900, seeds: Sequence[int] = SEEDS) -> list[Row]:
    workloads = [programs_and_documents(num_requests, seed) for seed in seeds]
    without, with_it = (replace(each, chunk=chunk) for each in (E2_REBALANCED, E2_WHOLE))
    setting = f"prefill/decode balance: programs and documents, {chunk} tokens a step"
    return _step(setting, ROOFLINE_A6000, without, with_it, workloads, "by the roofline of an A6000")


VIDEO_LOAD = 1.0


def figure_9(num_requests: int = 900, seeds: Sequence[int] = SEEDS) -> list[Row]:
    """Videos, whole prompts in a step as vLLM computed them: Preble against round-robin and the oracle partition."""
    name = "preble_vllm"
    runs: dict[tuple[str, int], list[Latencies]] = {}
    systems = [replace(each, chunk=chunk) for chunk in (WHOLE_PROMPTS, 2048) for each in (ROUND_ROBIN, ORACLE, PREBLE)]
    study = STUDIES["video"]
    for seed in seeds:
        rng = np.random.default_rng(seed)
        drawn = study.draw(rng, instants(rng, num_requests, 1.0), study.prefixes * TWO_A6000.num_replicas)
        arrivals = slowed(drawn, 1 / (VIDEO_LOAD * saturation(TWO_A6000, drawn)))
        for system in systems:
            runs.setdefault((system.name, system.chunk), []).append(simulate(TWO_A6000, system, arrivals))
    rows = []
    for metric in ("mean", "p99"):

        def over_preble(system: PrebleSystem, chunk: int, metric: str = metric) -> Draws:
            return ratios(runs[system.name, chunk], runs[PREBLE.name, chunk], metric)

        note = f"order: Preble before it; load {VIDEO_LOAD:g}, two A6000"
        whole = over_preble(ROUND_ROBIN, WHOLE_PROMPTS)
        for there, found in (("vLLM, round-robin", whole), ("oracle partition", over_preble(ORACLE, WHOLE_PROMPTS))):
            ours = float(np.mean(found.values))
            order = OrderCheck(ours > 1, bound=1.0)
            rows.append(Row(name, there, f"{metric} over Preble's", order, ours, note, found))
        chunked = over_preble(ROUND_ROBIN, 2048).values
        less = tuple(one / other for one, other in zip(whole.values, chunked, strict=True))
        ours = float(np.mean(less))
        note = "order: below 1, a smaller gain than on SGLang, which divides prompts"
        order = OrderCheck(ours < 1, bound=1.0)
        rows.append(Row(name, "gain on vLLM / on SGLang", metric, order, ours, note, Draws(len(less), less)))
    return rows


PREBLE_PARTS = (
    Reproduction("preble_vllm", "Preble, section 5.3, Figure 9", (figure_9,)),
    Reproduction(
        NAME,
        "Preble, section 5.4: parts where they act",
        (rebalancing, rebalancing_programs, partial(balancing, 2048), partial(balancing, SMALL_CHUNK)),
    ),
)
