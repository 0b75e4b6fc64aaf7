"""What the actors cost on top of the model, without HTTP: ``python -m benchmarks.actor_path --model DIR``.

Starts the components in a private cluster, sends requests from this process as an ingress replica would, and
reports, for
each placement: CPU time by component, per token and per step (the model's own forward passes aside), the
Scheduler's share of all of it, the idle gap between steps, and the time to the first token beside that of
``Engine`` alone. ``--delay``
holds back every message to and from the Schedulers: no step may wait for one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Coroutine, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from farsight.core.config.actors import ActorsConfig
from farsight.core.config.engine import EngineConfig, ModelConfig
from farsight.core.config.load import FarsightConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.request import SamplingParams
from farsight.services.api.requests import unnamed_request
from farsight.services.bench.requests import BenchRequest, PromptPart
from farsight.services.bench.statistics import percentile

if TYPE_CHECKING:
    from farsight.services.ingress.engine_client import EngineClient

PROMPT_LEN = 32
WARM_UP_S = 2.0
GAP = "farsight:step_gap_seconds_bucket"


def main() -> None:
    """Measures one placement and prints a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--placement", choices=("fused", "split"), default="split")
    parser.add_argument("--preset", default="fcfs")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--max-tokens", type=int, default=64, help="output lengths are uniform up to twice this")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds, to and from every Scheduler")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    config = FarsightConfig(
        model=ModelConfig(path=str(args.model), dtype=args.dtype),
        engine=EngineConfig(num_threads=args.threads),
        scheduler=SchedulerConfig(preset=args.preset),
        actors=ActorsConfig(placement=args.placement, scheduler_delay_s=args.delay),
    )
    alone_s = _ttft_alone(args.model, args.dtype, args.threads) if not args.delay else None
    with _site(config) as site:
        figures = _as_replica(_measure(site, args))
    if alone_s is not None:
        figures["ttft_alone_p50_s"] = alone_s
        figures["ttft_added_p50_s"] = figures["ttft_c1_p50_s"] - alone_s
    print(json.dumps({"placement": args.placement, "preset": args.preset, "delay_s": args.delay, **figures}, indent=1))


@contextmanager
def _site(config: FarsightConfig) -> Iterator[Any]:
    from farsight.services.launch.cluster import private_cluster
    from farsight.services.launch.launch import find_model, find_site, start_components
    from farsight.services.launch.signals import StopSignal
    from farsight.services.launch.stages import silent_stages

    site = find_site(config, find_model(config))
    stages = silent_stages(config.server.start_patience_s)
    with private_cluster(StopSignal(), stages=stages):
        start_components(site).wait(stages)
        yield site


def _as_replica(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Runs work on the event loop that an ingress replica has."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _measure(site: Any, args: argparse.Namespace) -> dict[str, Any]:
    from farsight.services.ingress.ingress import open_client

    client = await open_client(site)
    try:
        await _load(client, args.concurrency, WARM_UP_S, args.max_tokens)
        before = await _snapshot(client)
        num_tokens = await _load(client, args.concurrency, args.seconds, args.max_tokens)
        figures = _difference(before, await _snapshot(client), num_tokens, args.seconds)
        ttfts = [await _one(client, seed, 8) for seed in range(60)]
        return figures | {"ttft_c1_p50_s": statistics.median(ttft for ttft, _ in ttfts)}
    finally:
        await client.close()


async def _load(client: EngineClient, concurrency: int, seconds: float, max_tokens: int) -> int:
    """A closed loop whose requests arrive and end all the time; returns the output tokens."""
    deadline = time.monotonic() + seconds

    async def client_loop(number: int) -> int:
        rng, total = random.Random(number), 0
        while time.monotonic() < deadline:
            total += (await _one(client, rng.getrandbits(30), rng.randint(1, 2 * max_tokens)))[1]
        return total

    return sum(await asyncio.gather(*(client_loop(number) for number in range(concurrency))))


async def _one(client: EngineClient, seed: int, max_tokens: int) -> tuple[float, int]:
    """Time to the first token and number of tokens of one request."""
    sampling = SamplingParams(max_tokens, ignore_eos=True)
    began, first_s, count = time.perf_counter(), 0.0, 0
    async with aclosing(client.stream(unnamed_request(_prompt(seed, client.model.vocab_size), sampling))) as deltas:
        async for delta in deltas:
            first_s = first_s or time.perf_counter() - began
            count += len(delta.token_ids)
    return first_s, count


def _prompt(seed: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(BenchRequest(0, 1, (PromptPart(seed, PROMPT_LEN),)).prompt_ids(vocab_size, salt=0))


async def _snapshot(client: EngineClient) -> dict[str, Any]:
    """CPU seconds by component (or by host, named after its first component), and the worker's own figures."""
    status = await client.overview.status()
    cpu: dict[str, float] = {}
    seen: set[int] = set()
    for row in status.components:
        if row.pid not in seen:
            seen.add(row.pid)
            cpu[row.name.partition("-")[0] if row.kind == "Ingress" else row.name] = _cpu_s(row.pid)
    figures: dict[str, float] = {"steps": 0.0, "model_cpu_s": 0.0, "scheduling_cpu_s": 0.0}
    gaps: dict[float, float] = {}
    for family in text_string_to_metric_families(await client.overview.metrics(open_metrics=False)):
        for sample in family.samples:
            if sample.name == GAP:
                gaps[float(sample.labels["le"])] = sample.value
            elif sample.name == "vllm:iteration_tokens_total_count":
                figures["steps"] = sample.value
            elif sample.name == "farsight:model_cpu_seconds_total":
                figures["model_cpu_s"] = sample.value
            elif sample.name == "farsight:scheduling_cpu_seconds_total":
                figures["scheduling_cpu_s"] = sample.value
    return {"cpu": cpu, "gaps": gaps, **figures}


def _cpu_s(pid: int) -> float:
    return sum(psutil.Process(pid).cpu_times()[:2])


def _difference(before: dict[str, Any], after: dict[str, Any], num_tokens: int, seconds: float) -> dict[str, Any]:
    steps = after["steps"] - before["steps"]
    model_cpu_s = after["model_cpu_s"] - before["model_cpu_s"]
    cpu = {name: after["cpu"][name] - used for name, used in before["cpu"].items() if name in after["cpu"]}
    path_cpu_s = sum(cpu.values()) - model_cpu_s
    scheduling_cpu_s = after["scheduling_cpu_s"] - before["scheduling_cpu_s"]
    gaps = {le: after["gaps"][le] - count for le, count in before["gaps"].items()}
    total = gaps[float("inf")]
    return {
        "tokens_per_s": num_tokens / seconds,
        "steps": steps,
        "scheduling_cpu_share": round(scheduling_cpu_s / sum(cpu.values()), 4),
        "path_cpu_us_per_token": 1e6 * path_cpu_s / num_tokens,
        "path_cpu_us_per_step": 1e6 * path_cpu_s / steps,
        "cpu_us_per_token": {name: round(1e6 * used / num_tokens, 1) for name, used in cpu.items()},
        "model_cpu_us_per_token": 1e6 * model_cpu_s / num_tokens,
        "gaps": total,
        "gap_share_below": {le: round(count / total, 4) for le, count in gaps.items()},
        "gap_p99_below_s": next(le for le, count in sorted(gaps.items()) if count >= 0.99 * total),
    }


def _ttft_alone(model: Path, dtype: str, threads: int) -> float:
    """The median time to the first token of ``Engine`` in this process, one request at a time."""
    from farsight.engine import Engine

    engine = Engine(model, dtype=dtype, engine=EngineConfig(num_threads=threads))
    ttfts = []
    for seed in range(60):
        began = time.perf_counter()
        engine.submit(_prompt(seed, 4096), SamplingParams(8, ignore_eos=True))
        engine.step()
        ttfts.append(time.perf_counter() - began)
        while not engine.idle:
            engine.step()
    return percentile(ttfts, 0.5)


if __name__ == "__main__":
    main()
